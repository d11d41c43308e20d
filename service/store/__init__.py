"""Redis, the only store: key names, scripts, an embedded server, access for routes and workers."""
