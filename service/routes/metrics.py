"""`/metrics`: for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response

from service.context import InContext

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus's text format"}},
)
async def metrics(context: InContext) -> Response:
    """Requests, inference, the session cache, and the store's last verification."""
    body, content_type = context.metrics.exposition()
    return Response(body, headers={"Content-Type": content_type})
