"""Messages between processes: one module per link, one wire format. No torch."""
