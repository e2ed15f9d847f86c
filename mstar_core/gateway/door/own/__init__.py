"""Routes that the gateway answers itself: merged lists, metrics, health, pages."""
