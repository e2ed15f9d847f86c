"""TLS of ports: certificates, and plain HTTP on a port that has one."""
