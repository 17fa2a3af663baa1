#!/usr/bin/env bash
# Supervised fine-tuning. Without MODEL and DATA: a model and arithmetic made on the spot (about 2 minutes on 2 cores).
#
#   bash examples/scripts/train_sft.sh
#   MODEL=... DATA=qa.jsonl EPOCHS=2 LR=1e-5 MAX_LEN=2048 TEMPLATE=$'User: {}\nAssistant: ' bash examples/scripts/train_sft.sh
#
# What follows the script's name goes to the command and wins over the flags below.
set -euo pipefail
source "$(dirname "$0")/common.sh"

MODEL=${MODEL:-$(toy_model)}         # folder or hub name
DATA=${DATA:-$(toy_data sft.jsonl)}  # records with INPUT_KEY and OUTPUT_KEY
INPUT_KEY=${INPUT_KEY:-input}
OUTPUT_KEY=${OUTPUT_KEY:-output}
TEMPLATE=${TEMPLATE:-'{}'}           # text around each prompt
OUT=${OUT:-out/sft}
EPOCHS=${EPOCHS:-14}                 # for the toy; 1 to 3 for a pretrained model
LR=${LR:-2e-3}                       # for the toy; about 1e-5 for a pretrained model
MAX_LEN=${MAX_LEN:-32}               # for the toy; 2048 and more for text
SAVE_STEPS=${SAVE_STEPS:-200}        # steps between checkpoints; --ckpt.load_enable goes on from the newest

run train_sft \
    --model.model_name_or_path "$MODEL" \
    --data.dataset "$DATA" \
    --data.input_key "$INPUT_KEY" \
    --data.output_key "$OUTPUT_KEY" \
    --data.input_template "$TEMPLATE" \
    --data.max_len "$MAX_LEN" \
    --train.batch_size 64 \
    --train.dynamic_batch_enable \
    --train.max_tokens_per_gpu 8192 \
    --train.max_epochs "$EPOCHS" \
    --adam.lr "$LR" \
    --logger.logging_steps 10 \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps "$SAVE_STEPS" \
    "$@"
