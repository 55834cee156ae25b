#!/usr/bin/env bash
# Everything that needs a GPU, in five minutes at most: tests, throughput, a default job, full MNIST to 99%.
#
#     bash benchmarks/gpu.sh [mnist_train.csv.gz]
#
# The file of the 60,000 training digits is not part of the project; without it, the last part is left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-.}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python -m pytest -q tests/test_gpu.py tests/training/test_loop.py
python -m benchmarks.training --processes 1 --json "$out/gpu_training.json"
python train_accel.py --pt_path "$out/gpu_default" --resume never --seed 1 --log_with none | tail -n 3
if [[ -n "${1:-}" ]]; then
    # Twice: the first parses the file.
    for run in 1 2; do
        python train_accel.py --config recipes/fast.yaml --mnist_file_path "$1" \
            --val_file_path data/mnist_test.csv.gz --test_file_path data/mnist_test.csv.gz --target_accuracy 0.99 \
            --pt_path "$out/gpu_fast_$run" --resume never --log_with none | tail -n 3
    done
fi
