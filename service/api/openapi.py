"""The OpenAPI document of the app, with the schemas of bodies that routes read themselves, and the
token."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from .middleware import OPEN


class OpenApiDocument:
    """Makes the document of `app` at the first request for it; in place of `app.openapi`."""

    def __init__(self, app: FastAPI, *, needs_token: bool) -> None:
        self._app = app
        self._generate = app.openapi
        self._needs_token = needs_token

    def __call__(self) -> dict[str, Any]:
        """The document, of which the app keeps one."""
        if self._app.openapi_schema is None:
            self._complete(self._generate())
        return self._generate()

    def _complete(self, document: dict[str, Any]) -> None:
        components = document.setdefault("components", {})
        for path, operations in document["paths"].items():
            for operation in operations.values():
                components.setdefault("schemas", {}).update(_local_schemas(operation))
                if self._needs_token and path in OPEN:
                    operation["security"] = []
        if self._needs_token:
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"token": []}]


def _local_schemas(operation: dict[str, Any]) -> dict[str, Any]:
    """Definitions within the body's schema, which leave it: references are to `components`."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    found: dict[str, Any] = schema.pop("$defs", {})
    return found
