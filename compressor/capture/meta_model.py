"""Build the meta model of a transformers model: its class and configuration, parameters with shapes and no storage.

Exporting the meta model rather than the model costs no memory, leaves a model in memory untouched, and makes the
graph's arithmetic float32 whatever type the checkpoint is stored in.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from compressor.capture.attention.interface import (
    ATTENTION_NAME,
    Recorder,
    masks_left_out,
    recording,
    register_attention,
)
from compressor.capture.attention.masks import MaskRule
from compressor.capture.attention.rotations import make_rotations_pure
from compressor.capture.checkpoints.gguf.gguf_models import find_gguf
from compressor.capture.checkpoints.open_checkpoint import open_checkpoint
from compressor.capture.checkpoints.ties import untie
from compressor.capture.experts.interface import EXPERTS_NAME, register_experts
from compressor.capture.export import error_context
from compressor.capture.images.classifier import is_image_classifier
from compressor.capture.images.image_attention import use_image_attention
from compressor.capture.kinds import (
    auto_class,
    is_ctc,
    is_decoder,
    is_pair,
    reads_more_than_text,
    seq2seq_kind,
    text_notes,
)
from compressor.capture.recurrence.functions import functions_replaced
from compressor.capture.recurrence.rwkv import check_unscaled, leave_unscaled
from compressor.capture.recurrence.states import StateKey
from compressor.capture.renames import renamed_source
from compressor.capture.weights import WeightSource, module_source
from compressor.errors import CaptureError, UsageError, first_line
from compressor.host.json_files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Kind: TypeAlias = Literal["decoder", "encoder", "seq2seq", "module", "pair", "ctc"]
_PLAIN = ("module", "pair", "ctc")  # they attend as their code says, without a cache
"""A module is an image classifier here, and a pair has a half for pictures and one for texts."""

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class MetaModel:
    """A meta model and where its weights are."""

    kind: Kind
    model: PreTrainedModel
    interface: bool  # built with our attention; False where the class picks attention from a table of its own
    source: WeightSource
    name: str
    folder: Path | None
    config_sha256: str
    eos_ids: tuple[int, ...]
    bos_id: int | None
    generation: Mapping[str, Any] = field(default_factory=dict)  # settings, by transformers' names
    notes: tuple[str, ...] = ()  # what the user should know


def cache_argument(model: nn.Module) -> str:
    """Return the name of the cache among a decoder's arguments and results: transformers 5.24 made it ``cache``.

    RWKV has a list of states in its place, ``state``, which is left out (:mod:`compressor.capture.recurrence.rwkv`).
    """
    known = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values", "state") if name in known), "past_key_values")


class DecoderProgram(nn.Module):
    """The decoder's contract: (ids, position, keep, k_cache, v_cache) -> (logits, new keys, new values).

    Where it has recurrent layers, their states follow the caches, and the new states the new values.
    """

    def __init__(self, model: nn.Module, self_made: bool = False) -> None:
        super().__init__()
        self.hf, self.self_made = model, self_made
        self.names = {module: name for name, module in model.named_modules()}
        self.selects = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.first_position = 0  # what the model calls the first one
        self.counts_from_cache = False  # it takes no positions, and goes on where its cache ends
        self.cache_argument = cache_argument(model)
        leave_unscaled(model)
        self.rules: dict[str, MaskRule] = {}
        self.layers: list[int] = []  # those with keys and values
        self.cache_size: tuple[int, int] | None = None  # heads and channels, where layers differ
        self.state_keys: list[StateKey] = []

    def forward(
        self,
        ids: Tensor,
        position: Tensor,
        keep: Tensor,
        k_cache: list[Tensor],
        v_cache: list[Tensor],
        states: list[Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """See :func:`compressor.capture.capture.capture` for the shapes."""
        k, v = (dict(zip(self.layers, caches, strict=True)) for caches in (k_cache, v_cache))
        held = dict(zip(self.state_keys, states or [], strict=True))
        recorder = Recorder(self.names, position=position, k_cache=k, v_cache=v, rules=self.rules, states=held)
        result = self.run(recorder, ids, keep)
        return (*result, [recorder.new_states[key] for key in self.state_keys]) if self.state_keys else result

    def run(
        self, recorder: Recorder, ids: Tensor, keep: Tensor, own_positions: bool = False
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Call the model with a stand-in cache.  ``position`` broadcasts over the batch.

        Args:
            own_positions: let the model count by itself, from the first.
        """
        assert recorder.position is not None
        recorder.cache_size = self.cache_size
        recorder.counts = recorder.counts and not self.self_made  # what is written out is traced on empty caches
        extra: dict[str, Any] = {"logits_to_keep": keep} if self.selects else {}
        cached: dict[str, Any] = {self.cache_argument: recorder, "use_cache": True}
        extra |= {"use_cache": False} if self.cache_argument == "state" else cached
        if self.takes_positions and not own_positions:
            position = recorder.position[None]
            extra["position_ids"] = position + self.first_position if self.first_position else position
        with recording(recorder), functions_replaced(self.hf, recorder):
            out = self.hf(input_ids=ids, **extra)
        recorder.check_states()
        logits = out.logits if self.selects else out.logits[:, keep]
        layers = sorted(recorder.keys)
        return logits, [recorder.keys[i] for i in layers], [recorder.values[i] for i in layers]


class EncoderProgram(nn.Module):
    """The encoder's contract: (ids, mask) -> last hidden state."""

    def __init__(self, model: nn.Module, self_made: bool = False) -> None:
        super().__init__()
        self.hf, self.self_made = model, self_made
        self.names = {module: name for name, module in model.named_modules()}
        self.typed = "token_type_ids" in inspect.signature(model.forward).parameters
        self.rules: dict[str, MaskRule] = {}

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """See :func:`compressor.capture.capture.capture` for the shapes."""
        return self.run(Recorder(self.names, mask=mask, rules=self.rules), ids)

    def run(self, recorder: Recorder, ids: Tensor) -> Tensor:
        """Call the model; all tokens are of the first type, as when a tokenizer encodes one text."""
        extra = {"token_type_ids": torch.zeros(ids.shape, dtype=torch.int64)} if self.typed else {}
        with recording(recorder), masks_left_out() if self.self_made else nullcontext():
            out = self.hf(input_ids=ids, attention_mask=recorder.mask, **extra)
        return cast(Tensor, out.last_hidden_state)


def folder_meta_model(model: str | Path, trust_remote_code: bool, weights: bool = True) -> MetaModel:
    """Build the meta model of a Hugging Face folder or hub id; the class is the one that config.json names.

    Raises:
        CaptureError: no such model, or its configuration or files cannot be used.
    """
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForCTC, AutoModelForImageClassification

    folder, name = _locate(model)
    checkpoint = open_checkpoint(folder, trust_remote_code, weights)
    config, config_file = checkpoint.config, checkpoint.file
    kind = model_kind(config, str(config_file))
    images, auto_ctc = AutoModelForImageClassification, AutoModelForCTC
    autos: dict[Kind, Any] = {"decoder": AutoModelForCausalLM, "module": images, "ctc": auto_ctc}
    auto = auto_class(config) if kind == "seq2seq" else autos.get(kind, AutoModel)
    named: Any = getattr(transformers, (config.architectures or [""])[0], None)
    half = kind == "encoder" and named is not None and named.__name__.endswith("EncoderModel")  # without its decoder
    if half or (kind == "decoder" and named is not None and reads_more_than_text(named.__name__)):
        make = partial(named._from_config, config, dtype=torch.float32)
    else:
        make = partial(auto.from_config, config, trust_remote_code=trust_remote_code, dtype=torch.float32)
    built, interface = _build(make, name, kind)
    special = {key: getattr(config, key, None) for key in ("eos_token_id", "bos_token_id")}
    generation, settings = folder / "generation_config.json", _generation(built)
    if generation.is_file():
        settings = read_object(generation)
        special |= {key: value for key, value in settings.items() if key in special}
    for key, value in special.items():
        several = key == "bos_token_id" and isinstance(value, list)
        if several or not all(type(number) is int for number in _ids(value)):
            raise CaptureError(f"{generation} or {config_file}: {key} is {value!r:.80}; fetch the files again")
    source = renamed_source(checkpoint.source, built)
    eos_ids, bos_id = _ids(special["eos_token_id"]), special["bos_token_id"]
    sha256, notes = checkpoint.config_sha256, (*text_notes(built), *untie(built, source))
    return MetaModel(kind, built, interface, source, name, folder, sha256, eos_ids, bos_id, settings, notes)


def memory_meta_model(model: PreTrainedModel, weights: bool = True) -> MetaModel:
    """Build the meta model of a transformers model in memory and share its tensors; heads of encoders are left out."""
    kind = model_kind(model.config, type(model).__name__, type(model).__name__)
    check_unscaled(model)
    whole = model if kind != "encoder" else cast("PreTrainedModel", model.base_model)
    cls: Any = type(whole)
    config = copy.deepcopy(whole.config)
    built, interface = _build(partial(cls._from_config, config, dtype=torch.float32), cls.__name__, kind)
    special = getattr(model, "generation_config", None) or model.config
    sha256 = hashlib.sha256(model.config.to_json_string().encode()).hexdigest()
    eos_ids = _ids(getattr(special, "eos_token_id", None))
    bos_id = getattr(special, "bos_token_id", None)
    source, name = module_source(whole), type(model).__name__
    settings, notes = _generation(model), (*text_notes(built), *untie(built, source))
    return MetaModel(kind, built, interface, source, name, None, sha256, eos_ids, bos_id, settings, notes)


def _generation(model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings with which a model generates, by transformers' names."""
    config: Any = getattr(model, "generation_config", None)
    return {} if config is None else cast("dict[str, Any]", config.to_dict())


def attend_as_written(model: nn.Module) -> None:
    """Make a model attend by its own code; what transformers offers for that leaves models as they are that lack it."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"


def fake_parameters(model: nn.Module, mode: FakeTensorMode) -> None:
    """Turn a meta model's parameters into fake CPU tensors of this mode, ties kept."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                with mode:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            module._parameters[name] = made[id(parameter)]


def _build(make: Callable[..., Any], name: str, kind: Kind) -> tuple[PreTrainedModel, bool]:
    """Construct with parameters on the meta device and buffers in memory, with their true values.

    Returns:
        The model, and whether it was built with our attention; else its class knows only attention of its own.
    """
    register_attention()
    register_experts()
    implementations = ("eager",) if kind in _PLAIN else (ATTENTION_NAME, "sdpa", "eager")
    moved = WeakIdKeyDictionary()

    def to_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta":
            return parameter
        if parameter not in moved:
            moved[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        return cast(nn.Parameter, moved[parameter])

    hook = register_module_parameter_registration_hook(cast("Callable[..., None]", to_meta))
    try:
        with torch.random.fork_rng(devices=[]), error_context(None, name):
            for implementation in implementations:
                try:
                    built = make(attn_implementation=implementation, experts_implementation=EXPERTS_NAME).eval()
                except (KeyError, ValueError) as error:  # what its own table lacks, or what it says not to support
                    if implementation == "eager" or (isinstance(error, KeyError) and error.args != (implementation,)):
                        raise
                    if implementation == ATTENTION_NAME and not isinstance(error, KeyError):
                        raise
                    continue
                make_rotations_pure(built)
                if kind in _PLAIN:
                    use_image_attention(built)
                return cast("PreTrainedModel", built), implementation == ATTENTION_NAME
            raise AssertionError("eager raises or returns")
    finally:
        hook.remove()


def model_kind(config: PreTrainedConfig, place: str, architecture: str = "") -> Kind:
    """Tell decoders, encoders and image classifiers by the architecture that the configuration names.

    Raises:
        CaptureError: it is none of them, or is quantised already; the message begins with ``place``.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise CaptureError(f"{place}: the model is already quantised; give the original, unquantised checkpoint")
    architecture = architecture or (config.architectures or [""])[0]
    if getattr(config, "is_encoder_decoder", False):
        return seq2seq_kind(config, place, architecture)
    if is_ctc(config, architecture):
        return "ctc"
    if is_pair(config, architecture):
        return "pair"
    if is_image_classifier(config, architecture, place):
        return "module"
    return "decoder" if is_decoder(config, architecture) else "encoder"


def _locate(model: str | Path) -> tuple[Path, str]:
    """Folder and name of a model; a hub id is fetched into the hub's cache first."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.is_file() and path.suffix == ".gguf":
        if find_gguf(path.parent) != path:
            raise UsageError(f"{path}: other weights lie beside it; move it to a folder of its own, with its tokenizer")
        return path.parent, path.stem
    if path.exists():
        raise UsageError(
            f"{path}: a file; give the folder that holds config.json and the safetensors, or a GGUF file (.gguf)"
        )
    if isinstance(model, Path) or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", model):
        raise UsageError(f"{model}: no such folder; give a model folder or a Hugging Face id such as gpt2 or org/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES)), model
    except Exception as error:
        raise UsageError(
            f"{model}: no such folder here, and the Hugging Face hub does not give it ({first_line(error)}); check "
            "the name and the network, log in if the model is gated, or download it and give the folder"
        ) from error


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)
