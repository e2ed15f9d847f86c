"""Request and response types of the HTTP API. Used by the routes, /openapi.json and docs/http-api.md."""
