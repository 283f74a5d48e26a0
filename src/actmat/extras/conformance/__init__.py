"""Test-suites for authors of plug-ins: subclass one per format or family of experts."""
