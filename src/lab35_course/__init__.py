"""The course's machinery: what runs its fences, stores its numbers, and draws its figures.

Nothing here ships with the package. A chapter needs it only to be tested, measured and rendered.
"""
