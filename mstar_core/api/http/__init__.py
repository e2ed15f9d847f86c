"""HTTP mechanics of the api: bodies, framing, WebSockets, access rules and the exchange."""
