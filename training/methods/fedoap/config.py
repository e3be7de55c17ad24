"""What FedOAP takes: the network's open questions, the bank's bounds, and both stages of training."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from personalization.precision import Precision
from training.bounds import FeatureBounds
from training.choices.randomisation import RandomisationConfig


class FedOapConfig(RandomisationConfig):
    """Defaults suit a laptop. The paper's: 5 rounds, width 64, learning rate 1e-4."""

    width: int = Field(16, ge=1, description="channels of the U-Net at full resolution")
    attention: bool = Field(True, description="decoupled cross-attention; without, the plain bottleneck")
    adapter: bool = Field(True, description="the personal spatial adapter")
    kv: Literal["token-bank", "averaged", "own"] = Field(
        "token-bank",
        description="attend to own tokens and the other sites'; to own by shared, or by own, keys and values",
    )
    heads: int = Field(8, ge=1, validate_default=True, description="of the attention")
    groups: int = Field(32, ge=1, validate_default=True, description="of the group norm after it")
    residual: bool = Field(True, description="add the query features to what was attended")
    norm: Literal["sum", "output"] = Field("sum", description="what is normalised: the sum, or the output")
    stage_convolutions: Literal[1, 2] = Field(2, description="in the query and in the key/value stage")
    personal_start: Literal["shared", "drawn"] = Field(
        "shared", description="a personal part starts from the shared key/value stage, or from the seed"
    )
    local_steps: int = Field(20, ge=1, description="batches per round, at every site alike")
    batch_size: int = Field(16, ge=1)
    learning_rate: float = Field(1e-3, gt=0, description="of AdamW, at first")
    least_rate: float = Field(1e-6, ge=0, validate_default=True, description="where the cosine ends")
    cosine: Literal["run", "round"] = Field("run", description="one cosine over the run, or one per round")
    weight_decay: float = Field(1e-5, ge=0)
    augment: bool = Field(True, description="random rotation and flip in training")
    precision: Precision = Field(
        "float32", description="of training: bfloat16 takes half the time where the processor has it"
    )
    aggregation: Literal["uniform", "sample"] = Field(
        "uniform", description="weight of a site: 1/K, so that organs count alike, or n_k / n"
    )
    bank_minimum: int = Field(10, ge=1, description="training images below which a site sends no tokens")
    bank_clip: float | None = Field(None, gt=0, description="bound on the norm of an image's tokens")
    bank_noise: float = Field(
        0.0, ge=0, description="standard deviation of the noise on mean tokens, in bank_clip / images"
    )
    fine_tune_rounds: int = Field(2, ge=0, description="of stage 2, each validated; 0 leaves it out")
    fine_tune_steps: int | None = Field(None, ge=1, description="batches in each; local_steps by default")
    fine_tune_rate: float | None = Field(None, gt=0, description="at first; learning_rate by default")
    fine_tune_loss: Literal["perturbed", "plain"] = Field(
        "perturbed", description="perturbed boundary loss, or the loss of stage 1 as its control"
    )
    pbl_threshold: float = Field(0.75, ge=0, le=1, description="error above which a pixel is perturbed")
    pbl_variance: float = Field(0.1, ge=0, description="of the noise on its logit")
    pbl_trade_off: float = Field(0.1, ge=0, le=1, description="share of the perturbed term")
    selection: Literal["best", "last"] = Field(
        "best", description="a site's model of stage 2: the best on its validation patients, or the last"
    )
    zero_shot: Literal["shared", "mean"] = Field(
        "shared",
        description="the global model's query stage: the key/value stage, or the exported ones' mean",
    )

    @field_validator("heads", "groups")
    @classmethod
    def _divides(cls, value: int, info: ValidationInfo) -> int:
        features = 16 * info.data.get("width", value)
        if info.data.get("attention") and features % value:
            raise ValueError(f"expected a divisor of {features} (16 x width)")
        return value

    @field_validator("least_rate")
    @classmethod
    def _falls(cls, value: float, info: ValidationInfo) -> float:
        first = info.data.get("learning_rate", value)
        if value > first:
            raise ValueError(f"expected at most learning_rate, {first}: a rate falls to it")
        return value

    @field_validator("fine_tune_rate")
    @classmethod
    def _falls_too(cls, value: float | None, info: ValidationInfo) -> float | None:
        least = info.data.get("least_rate", 0.0)
        if value is not None and value < least:
            raise ValueError(f"expected at least least_rate, {least}, which it falls to")
        return value

    @field_validator("bank_noise")
    @classmethod
    def _in_units_of_the_clip(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("bank_clip") is None:
            raise ValueError("noise is measured in bank_clip / images: set bank_clip too")
        return value

    @property
    def bank(self) -> bool:
        """Whether tokens travel at all."""
        return self.attention and self.kv == "token-bank"

    @property
    def own_keys(self) -> bool:
        """Whether keys and values are personal too: then nothing shared can stand in for a query stage."""
        return self.attention and self.kv == "own"

    @property
    def bounds(self) -> FeatureBounds:
        """The federation's bounds on every site's entry in the bank."""
        return FeatureBounds(minimum_images=self.bank_minimum, clip=self.bank_clip, noise=self.bank_noise)

    @property
    def network(self) -> dict[str, Any]:
        """The arguments of the network that are options here."""
        options = ("width", "attention", "adapter", "heads", "groups", "residual", "norm")
        return {**{name: getattr(self, name) for name in options}, "convolutions": self.stage_convolutions}
