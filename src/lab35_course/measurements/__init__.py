"""One module a chapter: what it measures, as `lab35_course.results` describes; found by itself."""
