"""Routes: health, metrics, API documentation and dashboard, without external assets."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.staticfiles import StaticFiles

from .context import Ctx
from .metrics import exposition

router = APIRouter(tags=["sidecar"])

_DASHBOARD = Path(__file__).parent.parent / "dashboard"


@router.get("/v1/healthz")
@router.get("/healthz", include_in_schema=False)
async def healthz(ctx: Ctx) -> dict[str, Any]:
    """Health of the sidecar and its Redis, and the largest lag of a job; 503 if Redis does not
    answer."""
    await ctx.store.ping()
    lags_s = await ctx.lags.of(*await ctx.store.names())
    return {"status": "ok", "lag_s": max(lags_s, default=0.0)}


@router.get("/v1/livez")
@router.get("/livez", include_in_schema=False)
async def livez() -> dict[str, str]:
    """Life of the API process that answers, whatever Redis and the workers do."""
    return {"status": "ok"}


@router.get("/v1/metrics", response_class=Response)
@router.get("/metrics", include_in_schema=False)
async def metrics(ctx: Ctx) -> Response:
    """Metrics in the text format of Prometheus."""
    return Response(
        await exposition(ctx.store, ctx.lags, ctx.metrics), media_type=CONTENT_TYPE_LATEST
    )


@router.get("/docs", include_in_schema=False)
async def docs() -> HTMLResponse:
    """Swagger UI, from the installed package; addresses as in the dashboard."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="ResiHP sidecar",
        swagger_js_url="assets/swagger/swagger-ui-bundle.js",
        swagger_css_url="assets/swagger/swagger-ui.css",
        swagger_favicon_url="data:,",
    )


@router.get("/", include_in_schema=False)
@router.get("/dashboard", include_in_schema=False)
async def dashboard() -> FileResponse:
    """The dashboard."""
    return FileResponse(_DASHBOARD / "index.html", headers={"Cache-Control": "no-cache"})


def mount_assets(app: FastAPI) -> None:
    """Mount the static files of the dashboard and of Swagger UI."""
    app.mount("/assets/dashboard", _Assets(directory=_DASHBOARD), name="dashboard-assets")
    app.mount("/assets/swagger", _Assets(directory=_swagger_folder()), name="swagger")


class _Assets(StaticFiles):
    """Static files of which a browser asks each time whether they are still its own."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


@cache
def _swagger_folder() -> Path:
    spec = importlib.util.find_spec("swagger_ui_bundle")
    assert spec is not None, "swagger_ui_bundle is a dependency of the service"
    folders = map(Path, spec.submodule_search_locations or ())
    bundles = (path for each in folders for path in each.glob("vendor/*/swagger-ui-bundle.js"))
    return max(bundles).parent
