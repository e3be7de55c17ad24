"""`/metrics`: for Prometheus."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from service.context import InContext

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus's text format"}},
)
async def metrics(context: InContext) -> Response:
    """Requests, inference, the session cache, the store's last verification, and key usage's drift."""
    # In a thread, since some are read from the database, and not in one of those that requests wait for.
    body, content_type = await asyncio.to_thread(context.metrics.exposition)
    return Response(body, headers={"Content-Type": content_type})
