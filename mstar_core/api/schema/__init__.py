"""What clients send and get, as types: routes read and write them, /openapi.json and docs/http-api.md show them."""
