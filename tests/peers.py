"""Other people's implementations of the same mathematics, to hold lab35 against."""

from lab35_course.peers import to_hugging_face

__all__ = ["to_hugging_face"]
