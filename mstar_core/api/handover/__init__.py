"""Connections that outlive an api: what each records in shared memory, and how the next api continues it."""
