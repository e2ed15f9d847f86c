"""Fakes of real parts; they obey the same rules and are controlled by tests."""
