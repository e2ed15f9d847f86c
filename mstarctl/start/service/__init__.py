"""A deployment as a service of systemd: its unit, and the notifications of `up`."""
