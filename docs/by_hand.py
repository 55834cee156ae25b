"""Data-parallel training as it is often written by hand. docs/launching.md says what became of each numbered line.

torchrun --standalone --nproc_per_node 2 docs/by_hand.py
"""

import os
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH_SIZE, PATIENCE = 2, 256, 5
DIGITS = Path(__file__).resolve().parents[1] / "data" / "mnist_test.csv.gz"


def main() -> None:
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")  # (1)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])  # (2)
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")

    table = torch.from_numpy(pd.read_csv(DIGITS, header=None).to_numpy())  # (10,000, 785)
    images, labels = table[:, 1:].view(-1, 1, 28, 28).float() / 255, table[:, 0]
    train, val = TensorDataset(images[:9000], labels[:9000]), TensorDataset(images[9000:], labels[9000:])
    sampler = DistributedSampler(train, shuffle=True)  # (3)
    loader = DataLoader(train, batch_size=BATCH_SIZE, sampler=sampler)
    val_loader = DataLoader(val, batch_size=BATCH_SIZE, sampler=DistributedSampler(val, shuffle=False))

    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 12 * 12, 10)
    )
    if gpu:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # (4)
    model = DistributedDataParallel(model.to(device), device_ids=[local_rank] if gpu else None)  # (5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=gpu)  # (6)

    best, bad_epochs = float("inf"), 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # (7)
        model.train()
        for batch, target in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16, enabled=gpu):
                loss = F.cross_entropy(model(batch.to(device)), target.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        model.eval()
        total = torch.zeros(2, device=device)
        with torch.no_grad():
            for batch, target in val_loader:
                loss = F.cross_entropy(model(batch.to(device)), target.to(device), reduction="sum")
                total += torch.stack([loss, torch.tensor(float(len(target)), device=device)])
        dist.all_reduce(total)  # (8)
        val_loss = (total[0] / total[1]).item()
        best, bad_epochs = (val_loss, 0) if val_loss < best else (best, bad_epochs + 1)
        stop = torch.tensor(float(bad_epochs >= PATIENCE), device=device)
        dist.all_reduce(stop)  # (9)
        if rank == 0:
            print(f"epoch {epoch + 1}  val loss {val_loss:.4f}", flush=True)
            torch.save(model.state_dict(), os.path.join(os.environ.get("TMPDIR", "/tmp"), "by_hand.pt"))  # (10)
        if stop > 0:
            break


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # (11)
