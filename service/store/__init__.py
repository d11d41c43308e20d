"""Redis, the only store: keys and scripts, documents, access for routes and workers, a server."""
