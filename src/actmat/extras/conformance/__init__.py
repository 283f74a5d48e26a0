"""Test-suites for authors of plug-ins: subclass one per format, family of experts or executor."""
