"""Stand-ins for real parts; they obey the same rules and are told by tests what to do."""
