"""What pytest loads before the tests: their shared fixtures, and the means to test a plug-in."""

from __future__ import annotations

pytest_plugins = ["shared", "pytester"]
