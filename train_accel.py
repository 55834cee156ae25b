"""Train a digit classifier on one process or many, as one run.

    accelerate launch --multi_gpu --num_processes 2 train_accel.py
    accelerate launch --config_file accelerate_config.yaml train_accel.py
    torchrun --standalone --nproc_per_node 2 train_accel.py
    python train_accel.py                       # one process
    python train_accel.py --num_processes 2     # starts its own processes

All of them work with GPUs and without. `--help` lists the settings; the README explains the run folder.
"""

import gc
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mnist_ddp.errors import exit_with_one_line
from mnist_ddp.settings import OF_A_MACHINE, Settings, changed, parse_settings

if TYPE_CHECKING:
    from mnist_ddp.data.image_set import ImageSet

STARTED = time.perf_counter()
# What is imported stays. Looking through it for garbage, again and again, takes a fifth of the imports' time.
gc.disable()


def train(settings: Settings) -> int:
    """One run, on each of its processes: settings -> images -> loaders -> fit -> evaluate -> results.

    Returns:
        The exit status.
    """
    # Not at the top of the file: these import torch, which takes seconds, and --help should not.
    from mnist_ddp import console
    from mnist_ddp.data.loaders import make_loaders, make_splits, pixel_statistics
    from mnist_ddp.distributed import (
        check_same,
        collective_seconds,
        from_furthest,
        hidden,
        leaving,
        open_once,
        start_accelerator,
        together,
    )
    from mnist_ddp.model.convnet import build_model, check_batch_size
    from mnist_ddp.training import watchdog
    from mnist_ddp.training.early_stopping import EarlyStopping
    from mnist_ddp.training.evaluation import evaluate
    from mnist_ddp.training.loop import fit, reason_to_end
    from mnist_ddp.training.profiling import profile_steps
    from mnist_ddp.training.run_folder import RunFolder, describe_run
    from mnist_ddp.training.signals import StopSignals
    from mnist_ddp.training.state import FINISHED, start_training
    from mnist_ddp.training.tracker import log_metrics

    s = settings
    accelerator = start_accelerator(
        mixed_precision=s.mixed_precision,
        gradient_accumulation_steps=s.gradient_accumulation_steps,
        timeout_seconds=s.timeout_seconds,
        log_with=s.log_with,
        project_dir=s.pt_path,
        compile=s.compile,
    )
    with leaving(accelerator):
        is_main, processes = accelerator.is_main_process, accelerator.num_processes
        # On one process; without a shared file system, on one of each machine.
        folder, hosts = open_once(s.pt_path, lambda: RunFolder(s.pt_path, s.resume, s.keep_checkpoints))
        sets = together(lambda: read_images(s, progress=is_main and sys.stderr.isatty()))
        splits = together(
            lambda: make_splits(sets, val_fraction=s.val_fraction, test_fraction=s.test_fraction, seed=s.seed)
        )
        run = describe_run(s, splits, processes)
        check_same(
            {f"--{name}": value for name, value in asdict(s).items() if name not in OF_A_MACHINE}
            | {"precision": accelerator.mixed_precision, "images": run["images"], "versions": run["versions"]}
        )
        loaders = make_loaders(
            splits,
            accelerator.device,
            seed=s.seed,
            augment=s.augment,
            batch_size=s.batch_size,
            processes=processes,
            accumulation_steps=s.gradient_accumulation_steps,
        )
        with hidden("datasets"):  # which takes half a second to import, to learn that no loader is of its kind
            train_loader, val_loader, test_loader = accelerator.prepare(*loaders)

        digits = splits.train.image_set
        mean, std = pixel_statistics(splits.train)
        model = build_model(digits.class_names, digits.images.shape[1:], width=s.width, mean=mean, std=std, seed=s.seed)
        check_batch_size(model, s.batch_size, processes)
        state = start_training(
            accelerator,
            model,
            EarlyStopping(s.monitor, s.patience, s.min_delta),
            optimizer=s.optimizer,
            lr=s.lr,
            warmup_steps=s.warmup_steps,
            schedule=s.schedule,
            epochs=s.epochs,
            steps_per_epoch=len(train_loader) // s.gradient_accumulation_steps,
            global_batch=run["global_batch"],
            momentum=s.momentum,
            weight_decay=s.weight_decay,
            ema_decay=s.ema_decay,
        )
        # Before a collective, so that all processes handle signals once one has printed its start line.
        signals = StopSignals(accelerator)
        # After a restart, rank 0 may be on a machine whose folder is behind, or empty.
        snapshot, earlier, notes = from_furthest(
            lambda: folder.resume(run) if folder else (None, None, []),
            lambda found: found[0].position if found[0] else (),
        )
        if snapshot:
            state.restore(accelerator, snapshot)
        gc.freeze()  # nor is it looked through at exit, which would take a second
        gc.enable()
        ended = reason_to_end(accelerator, state, epochs=s.epochs, target_accuracy=s.target_accuracy, signals=signals)
        if earlier and ended in FINISHED and (earlier["status"], earlier["epochs"]) == (ended, state.epoch):
            if is_main:
                print(console.finished_line(earlier, s.pt_path, s.push_to_hub))
            return 0
        if earlier and ended == "preempted":  # before it has trained on: its result stands
            return 128 + (signals.agreed or 0)
        if folder:
            folder.begin(s, state)
        if is_main:
            notes += console.folder_notes(s.pt_path, hosts)
            print(*console.start_lines(accelerator, splits, run, model, state, notes), sep="\n", flush=True)

        def save() -> None:
            current = state.snapshot(accelerator, run)
            if folder:
                folder.checkpoints.save(current)

        watchdog.watch(collective_seconds(s.timeout_seconds))
        profile = profile_steps(accelerator, Path(s.pt_path) / "profile") if s.profile else nullcontext(lambda: None)
        with profile as after_step:
            for epoch in fit(
                accelerator,
                state,
                train_loader,
                val_loader,
                epochs=s.epochs,
                num_classes=len(digits.class_names),
                label_smoothing=s.label_smoothing,
                max_grad_norm=s.max_grad_norm,
                target_accuracy=s.target_accuracy,
                signals=signals,
                save=save,
                save_every_steps=s.checkpoint_every_steps,
                after_step=after_step,
                progress=is_main and sys.stderr.isatty(),
            ):
                if is_main:
                    print(console.epoch_line(epoch), flush=True)
                if folder:
                    folder.append_metrics(epoch.metrics())
                    if epoch.improved:
                        folder.save_model(state.average.module)
                if s.log_with != "none":
                    log_metrics(accelerator, s.log_with, Path(s.pt_path), asdict(s), epoch.metrics())

        test = None
        if state.best_weights is not None and state.status != "preempted":
            state.average.module.load_state_dict(state.best_weights)
            if folder:
                folder.save_model(state.average.module)  # again: a kill may have come between checkpoint and model
            test = evaluate(accelerator, state.average.module, test_loader, len(digits.class_names))
        watchdog.rest()
        if folder:
            result = state.result(test) | {
                "world_size": processes,
                "device": console.device_name(accelerator.device),
                "mixed_precision": accelerator.mixed_precision,
                "parameters": sum(p.numel() for p in model.parameters()),
                "wall_seconds": round(time.perf_counter() - STARTED, 3),
            }
            folder.write_result(result)
            # Not earlier: training knows nothing of results.
            from mnist_ddp.results.write import write_results

            write_results(
                folder.path,
                splits,
                state.average.module,
                test.confusion if test else None,
                autocast=accelerator.autocast,
                versions=run["versions"],
                changed_settings=changed(s),
                trackers=accelerator.trackers,
                step=state.step,
                push_to_hub=s.push_to_hub if is_main else "",
            )
            if is_main:
                print(console.end_line(result, s.pt_path))
        return {"diverged": 3, "preempted": 128 + (signals.agreed or 0)}.get(state.status or "", 0)


def read_images(s: Settings, progress: bool) -> "dict[str, ImageSet]":
    """The sets of a run by their names: "train" and, where they have images of their own, "validation" and "test"."""
    from mnist_ddp.data.hub import read_dataset
    from mnist_ddp.data.reading import read_files

    if s.dataset:
        return read_dataset(
            s.dataset,
            image_column=s.image_column,
            label_column=s.label_column,
            image_size=s.image_size,
            cache_dir=s.cache_dir,
            progress=progress,
        )
    return read_files(
        s.mnist_file_path,
        s.val_file_path,
        s.test_file_path,
        label_column=s.label_column,
        label_names=s.label_names,
        transposed=s.transposed,
        cache_dir=s.cache_dir,
        progress=progress,
    )


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training handles it, Ctrl-C ends without a traceback
    settings = parse_settings(sys.argv[1:])
    from mnist_ddp.distributed import launch

    return launch(train, settings)


if __name__ == "__main__":
    with exit_with_one_line():
        sys.exit(main())
