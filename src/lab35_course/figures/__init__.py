"""One module a chapter: its figures, as `lab35_course.figure` describes; found by itself."""
