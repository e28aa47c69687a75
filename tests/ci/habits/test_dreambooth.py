"""DreamBooth in the way of diffusers' script: a text encoder that is trained, too, prior preservation, EMA, and hooks.

Budget: 60 processor seconds; 53 were measured on a busy machine.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from zero import clip_grad_norm_

from ...contract.recipes import assert_same_dict
from ...support.launched import launch
from ...support.plain import assert_same_states

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from accelerate import Accelerator  # type: ignore[import-not-found, import-untyped, unused-ignore]
from accelerate.utils import set_seed  # type: ignore[import-not-found, import-untyped, unused-ignore]
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel  # type: ignore[import-not-found, import-untyped, unused-ignore]
from diffusers.optimization import get_scheduler  # type: ignore[import-not-found, import-untyped, unused-ignore]
from diffusers.training_utils import EMAModel  # type: ignore[import-not-found, import-untyped, unused-ignore]
from transformers import CLIPTextConfig, CLIPTextModel  # type: ignore[import-not-found, unused-ignore]

from zero.integrations.accelerate import ZeroAccelerator

pytestmark = pytest.mark.timeout(500)

LIMIT = 240  # seconds of two ranks on a busy machine

WORDS, LENGTH, STEPS, MICRO_BATCHES = 20, 6, 3, 2
RUNS = ((2, False), (3, True))  # the stage, and whether the text encoder is trained, too


def models() -> tuple[Any, Any, Any]:
    """Return the text encoder, the autoencoder and the UNet that `from_pretrained` would read."""
    words = CLIPTextConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8,), down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        latent_channels=4, norm_num_groups=2, layers_per_block=1, sample_size=8,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8, attention_head_dim=4, norm_num_groups=2,
    )  # fmt: skip
    return CLIPTextModel(words), vae, unet


class Images(torch.utils.data.Dataset[dict[str, Any]]):
    """Pictures of the subject and of its class, with their prompts."""

    def __len__(self) -> int:
        return STEPS * MICRO_BATCHES * 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        found: dict[str, Any] = {"index": index}
        for name in ("instance", "class"):
            found[f"{name}_images"] = torch.randn(3, 8, 8, generator=draw)
            found[f"{name}_prompt_ids"] = torch.randint(2, WORDS, (1, LENGTH), generator=draw)
        return found


def collate_fn(examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the pictures of the class behind those of the subject: one forward for both."""
    names = ("instance", "class")
    return {
        "input_ids": torch.cat([each[f"{name}_prompt_ids"] for name in names for each in examples]),
        "pixel_values": torch.stack([each[f"{name}_images"] for name in names for each in examples]),
        "seed": examples[0]["index"],
    }


def script(
    accelerator: Any, train_text_encoder: bool, output_dir: Path, resume: Path | None = None, stage: int = 0
) -> None:
    """Train as examples/dreambooth/train_dreambooth.py does.

    Of each micro-batch the noise is drawn from a seed of its own, so that it does not depend on the rank. Beside the
    accelerator, the lines with ``sharded`` are changed, for stage 3, and `save_state` is called on all ranks.
    """
    sharded = stage == 3
    set_seed(3)
    text_encoder, vae, unet = models()
    noise_scheduler = DDPMScheduler(num_train_timesteps=50)
    vae.requires_grad_(False)
    if not train_text_encoder:
        text_encoder.requires_grad_(False)
    ema_unet = EMAModel(unet.parameters(), decay=0.9, model_cls=UNet2DConditionModel, model_config=unet.config)

    def unwrap_model(model: Any) -> Any:
        return accelerator.unwrap_model(model)

    def save_model_hook(models: list[Any], weights: list[Any], folder: str) -> None:
        if accelerator.is_main_process:
            for model in models:
                name = "unet" if isinstance(model, type(unwrap_model(unet))) else "text_encoder"
                model.save_pretrained(f"{folder}/{name}")
                weights.pop()  # so that accelerate does not save it again

    def load_model_hook(models: list[Any], folder: str) -> None:
        while models:
            model = models.pop()
            name = "unet" if isinstance(model, type(unwrap_model(unet))) else "text_encoder"
            loaded = type(model).from_pretrained(folder, subfolder=name)
            model.load_state_dict(loaded.state_dict())

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    unet.enable_gradient_checkpointing()
    parts = (unet, text_encoder) if train_text_encoder else (unet,)
    optimizer = torch.optim.AdamW(itertools.chain(*(part.parameters() for part in parts)), lr=5e-3, weight_decay=1e-2)
    train_dataloader = DataLoader(Images(), batch_size=2, collate_fn=collate_fn)
    lr_scheduler = get_scheduler(
        "cosine",
        optimizer=optimizer,
        num_warmup_steps=1 * accelerator.num_processes,
        num_training_steps=STEPS * accelerator.num_processes,
    )
    if train_text_encoder:
        unet, text_encoder, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
            unet, text_encoder, optimizer, train_dataloader, lr_scheduler
        )
    else:
        unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
            unet, optimizer, train_dataloader, lr_scheduler
        )
        text_encoder.to(accelerator.device)
    vae.to(accelerator.device)
    global_step = 0
    if resume is not None:
        accelerator.load_state(str(resume))
        global_step = int(resume.name.split("-")[1])
        done = global_step * accelerator.gradient_accumulation_steps
        train_dataloader = accelerator.skip_first_batches(train_dataloader, done)

    unet.train()
    for batch in train_dataloader:
        with accelerator.accumulate(unet):
            draw = torch.Generator().manual_seed(int(batch["seed"]))
            latents = vae.encode(batch["pixel_values"]).latent_dist.sample(draw) * vae.config.scaling_factor
            noise = torch.randn(latents.shape, generator=draw)
            timesteps = torch.randint(0, 50, (len(latents),), generator=draw)
            noisy = noise_scheduler.add_noise(latents, noise, timesteps)
            hidden = text_encoder(batch["input_ids"], return_dict=False)[0]
            model_pred = unet(noisy, timesteps, hidden, return_dict=False)[0]
            model_pred, model_pred_prior = torch.chunk(model_pred, 2, dim=0)
            target, target_prior = torch.chunk(noise, 2, dim=0)
            prior_loss = functional.mse_loss(model_pred_prior.float(), target_prior.float(), reduction="mean")
            loss = functional.mse_loss(model_pred.float(), target.float(), reduction="mean") + 0.5 * prior_loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(itertools.chain(*(part.parameters() for part in parts)), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad(set_to_none=False)
        if accelerator.sync_gradients:
            with optimizer.optimizer.gathered() if sharded else nullcontext():
                ema_unet.step(unet.parameters())
            global_step += 1
            if global_step == 1:
                accelerator.save_state(str(output_dir / f"checkpoint-{global_step}"))

    accelerator.wait_for_everyone()
    if sharded:
        optimizer.optimizer.close()
    if accelerator.is_main_process:
        unwrap_model(text_encoder).save_pretrained(output_dir / "text_encoder")
        unwrap_model(unet).save_pretrained(output_dir / "unet")
        ema_unet.copy_to(unet.parameters())
        unwrap_model(unet).save_pretrained(output_dir / "ema")


class Plain(Accelerator):  # type: ignore[misc, unused-ignore]
    """accelerate's own, but for torch's norm of a clip: its last bits depend on how gradients are cut."""

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        return clip_grad_norm_(parameters, max_norm, norm_type)


def on_two_ranks(started: dict[str, Any], folder: Path) -> None:
    """Run the script at each stage, and again from its first checkpoint."""
    for stage, train_text_encoder in RUNS:
        for name, resume in ((f"{stage}", None), (f"resumed-{stage}", folder / f"{stage}" / "checkpoint-1")):
            accelerator = ZeroAccelerator(stage=stage, gradient_accumulation_steps=MICRO_BATCHES // 2)
            script(accelerator, train_text_encoder, folder / name, resume, stage)
            accelerator.free_memory()


def test_dreambooth_has_the_bits_of_accelerate_in_its_models_averages_checkpoints_and_resumptions(
    tmp_path: Path,
) -> None:
    for both in (False, True):
        accelerator = Plain(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
        script(accelerator, both, tmp_path / f"plain-{both}")
        accelerator.free_memory()
    launch(f"{__name__}:on_two_ranks", tmp_path, limit=LIMIT)
    for stage, both in RUNS:
        expected = tmp_path / f"plain-{both}"
        checkpointed = ("unet", "text_encoder") if both else ("unet",)
        for part in ("unet", "text_encoder", "ema", *(f"checkpoint-1/{name}" for name in checkpointed)):
            assert_same_dict(weights(tmp_path / f"{stage}" / part), weights(expected / part))
        for part in ("unet", "text_encoder"):
            assert_same_dict(weights(tmp_path / f"resumed-{stage}" / part), weights(expected / part))
        states = (torch.load(each / "checkpoint-1" / "optimizer.bin") for each in (tmp_path / f"{stage}", expected))
        assert_same_states(*states)


def weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    (file,) = folder.glob("*.safetensors")
    return load_file(file)  # type: ignore[no-any-return, unused-ignore]
