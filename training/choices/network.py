"""The network of a method: the task's default, or one of the registry by name and arguments."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from model_store.manifest import NetworkLayers, NetworkSpec
from model_store.task import Task
from personalization.errors import NetworkError
from personalization.networks import outline
from personalization.networks.capabilities import traits_of
from personalization.networks.registry import DEFAULTS, builder, check_origin, origin_of
from personalization.test_time.recipe import movable_in
from training.config import MethodConfig
from training.errors import ConfigurationError
from training.planning.topology import dynunet_arguments

_CHOICE = ("network", "network_arguments", "network_origin", "start", "start_new")


class NetworkConfig(MethodConfig):
    """Configuration of a method that trains any registered network on its own."""

    width: int = Field(16, ge=1, description="channels of the network at full resolution")
    network: str | None = Field(None, description="a registered network; without it, the task's default")
    network_arguments: dict[str, Any] = Field(
        {}, description="of that network, beside channels, classes and width"
    )

    network_origin: dict[str, str] | None = Field(
        None, description="class, package and version of a network of another package; found, not chosen"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_origin(cls, content: Any) -> Any:
        """Note where a package's network comes from: every member must have the same."""
        if not isinstance(content, dict) or not isinstance(content.get("network"), str):
            return content
        try:
            origin = origin_of(content["network"])
        except NetworkError as error:
            raise ValueError(str(error)) from error
        return content if origin is None else {"network_origin": origin, **content}

    @model_validator(mode="after")
    def _is_here(self) -> Self:
        try:
            check_origin(self.network or "", self.network_origin)
        except NetworkError as error:
            raise ValueError(str(error)) from error
        return self

    @model_serializer(mode="wrap")
    def _without_what_says_nothing(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave a choice that was not made out: the identity of a run has what was chosen."""
        content: dict[str, Any] = plain(self)
        return {name: value for name, value in content.items() if name not in _CHOICE or value}

    def network_for(self, task: Task) -> NetworkSpec:
        """The network that is trained for a task.

        Raises ConfigurationError for one that is unknown, does not take its arguments, is for another kind of
        task, or does not take the task's size.
        """
        name = self.network or DEFAULTS[task.kind, task.spatial_dims]
        try:
            common: dict[str, Any] = {"in_channels": task.in_channels, "classes": task.out_channels}
            if task.geometry is not None and self.network is None:
                # Pooled where the voxels are fine, by nnU-Net's rules.
                spacing = [mm or 1.0 for mm in task.geometry.spacing or (None,) * 3]
                common |= dynunet_arguments(spacing, task.geometry.patch, self.width)
            else:
                taken = inspect.signature(builder(name)).parameters
                common |= {"width": self.width} if "width" in taken else {}
                common |= {"spatial_dims": task.spatial_dims} if "spatial_dims" in taken else {}
            arguments = {**common, **self.network_arguments}
            spec = NetworkSpec.model_validate(
                {"name": name, "arguments": arguments, "origin": origin_of(name)}
            )
            layers = outline(name, **spec.arguments)
            if spec.origin is not None:
                spec = spec.model_copy(update={"layers": NetworkLayers(**asdict(movable_in(layers)))})
            traits = traits_of(layers)
            if traits.task != task.kind:
                raise NetworkError(
                    f"{name}: expected a network for a {task.kind}, found one for a {traits.task}"
                )
            traits.check_sides(task.input_shape, name)
        except NetworkError as error:
            raise ConfigurationError(
                f"the network does not fit the task {task.name!r}", [str(error)]
            ) from error
        return spec
