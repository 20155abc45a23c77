"""A quantized model with adapters, sharded by FSDP2 over two processes of this machine.

Prints "same" from each process where outputs, losses of a few steps and the gathered state dict
are those of the model in one piece.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from polyquant.torch import QParameter, lora_, quantize_


def main() -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        sys.stdout.write("no process group: this torch is built without gloo")
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        children = [os.fork() or _child(rank, meeting) for rank in range(2)]
        codes = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(codes))


def _child(rank: int, meeting: Path) -> int:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole, sharded = _model(), _model()
    for layer in (*sharded, sharded):
        fully_shard(layer, mesh=mesh)
    x = torch.linspace(-1, 1, 128).reshape(4, 32)
    same = torch.equal(sharded(x), whole(x)) and _steps(sharded, x) == _steps(whole, x)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(sharded, options=options)
    for name, child in whole.named_modules():
        if isinstance(child, QParameter) and rank == 0:
            same &= torch.equal(state[f"{name}.data"], child.state_dict()["data"])
    dist.destroy_process_group()
    os.write(1, b"same\n" if same else b"different\n")
    os._exit(0)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    # 63 rows do not divide by two, and the scales are quantized themselves.
    layers = nn.Sequential(nn.Linear(32, 63), nn.Linear(63, 8))
    quantize_(layers, "u4[nf4]/32:(u8[dynamic8u]/256:f32)")
    lora_(layers, rank=4)
    return layers


def _steps(model: nn.Module, x: torch.Tensor) -> list[float]:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
