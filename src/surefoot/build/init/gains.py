"""How wide to draw a layer's weights, by the activation that follows it.

A layer with fan-in `n` draws its weights with variance `C / n`. Push a signal of variance `q` through `activation` and
the next such layer and the variance becomes `C · E[φ(√q z)²]` (plus the variance of the bias), while the gradient on
the way back is multiplied by `C · E[φ'(√q z)²]`. A deep network keeps both scales when both maps are the identity:

* ReLU and similar functions are scale-free: `C = 2` does it at every `q` (He et al. 2015, arXiv:1502.01852).
* GELU and SiLU are not. They have one variance `q*` at which both maps have slope one, and they need a bias of a given
  variance to stay there (Roberts, Yaida and Hanin, "The Principles of Deep Learning Theory", 2022, section 5.3.4). A
  layer fed by standardised data must bring the signal *to* `q*` in one go; the next ones keep it.
* tanh is critical only at `q* = 0` with `C = 1`, where the signal dies off slowly. `C = 1.3` gives a small positive
  `q*` at which the gradient still moves by less than one per cent a layer; the often seen gain of 5/3 (`C = 2.8`)
  multiplies the gradient by about 90 over 50 layers.

Activations that are not in the table get ReLU's value, and the report says so.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Gain:
    """The variances that keep the scale around one activation."""

    weight: float
    """Fan × variance of the weights of a layer that is fed by this same activation."""

    bias: float
    """Variance of the biases; 0 means they start at zero."""

    fixed_point: float | None
    """The pre-activation variance this gain is made for; `None` when any will do."""

    fan: Literal["in", "average"]
    """Which fan divides: `in` (He, LeCun) or the average of in and out (Xavier)."""

    recipe: str
    """The name of the recipe."""

    @property
    def aim(self) -> float:
        """The pre-activation variance the layer should show, for activations of about unit scale where it is free."""
        return self.weight if self.fixed_point is None else self.fixed_point

    def for_layer(self, *, has_bias: bool, fed_by_activation: bool) -> "Gain":
        """Adapt to a layer at the entry of the network, or to one that has no bias to put the variance into."""
        if self.fixed_point is None:
            return self
        bias = self.bias if has_bias else 0.0
        if not fed_by_activation:
            weight = self.fixed_point - bias
        else:
            activated = (self.fixed_point - self.bias) / self.weight  # E[φ²] at the fixed point
            weight = (self.fixed_point - bias) / activated
        return Gain(weight, bias, self.fixed_point, self.fan, self.recipe)


def he(slope: float = 0.0) -> Gain:
    """Give the gain of ReLU, or of a leaky ReLU with this slope on the negative side."""
    return Gain(2.0 / (1.0 + slope * slope), 0.0, None, "in", "he")


XAVIER = Gain(1.0, 0.0, None, "average", "xavier")
"""No activation, or a sigmoid-like one (Glorot and Bengio 2010)."""

GAINS: dict[str, Gain] = {
    "none": XAVIER,
    "sigmoid": XAVIER,
    "softsign": XAVIER,
    "tanh": Gain(1.3, 0.0, None, "average", "xavier"),
    "hardtanh": Gain(1.3, 0.0, None, "average", "xavier"),
    "relu": he(),
    "gelu": Gain(1.98305826, 0.17292239, 3.56155281, "in", "critical"),
    "silu": Gain(1.98800470, 0.55514303, 14.32008219, "in", "critical"),
    "selu": Gain(1.0, 0.0, None, "in", "lecun"),
}
"""By the name of the activation. SELU: Klambauer et al. 2017, arXiv:1706.02515."""


def gain_for(activation: str, slope: float = 0.0) -> Gain:
    """Look up the gain; a leaky ReLU needs its slope, an activation without an entry is treated as a ReLU."""
    if activation == "leaky_relu":
        return he(slope)
    return GAINS.get(activation, GAINS["relu"])
