#!/usr/bin/env bash
# RLOO: the mean of a prompt's other answers is the baseline; the KL to the reference is part of the reward (k1).
#
#   bash examples/scripts/train_rloo.sh
#
# What follows the script's name goes to the command and wins over the flags below.
set -euo pipefail
source "$(dirname "$0")/common.sh"

MODEL=${MODEL:-$(toy_policy)}             # folder or hub name
DATA=${DATA:-$(toy_data prompts.jsonl)}   # records with INPUT_KEY and LABEL_KEY
EVAL=${EVAL:-$(toy_data heldout.jsonl)}   # the same form, never trained on
INPUT_KEY=${INPUT_KEY:-input}
LABEL_KEY=${LABEL_KEY:-label}
REWARD=${REWARD:-$ROOT/examples/python/reward_chain_sum.py} # file with reward_func, or http(s) addresses
OUT=${OUT:-out/rloo}
PROMPTS=${PROMPTS:-1920}                  # prompts used
LR=${LR:-3e-4}                            # for the toy; about 1e-6 for a pretrained model
MAX_LEN=${MAX_LEN:-32}                    # prompt and answer, in tokens
MAX_NEW=${MAX_NEW:-8}                     # answer, in tokens
SAVE_STEPS=${SAVE_STEPS:-20}              # steps between checkpoints; --ckpt.load_enable goes on from the newest

run train_rloo_ray \
    --actor.model_name_or_path "$MODEL" \
    --data.prompt_dataset "$DATA" \
    --data.input_key "$INPUT_KEY" \
    --data.label_key "$LABEL_KEY" \
    --data.max_samples "$PROMPTS" \
    --data.max_len "$MAX_LEN" \
    --rollout.max_new_tokens "$MAX_NEW" \
    --reward.remote_url "$REWARD" \
    --actor.adam.lr "$LR" \
    --train.dynamic_batch_enable \
    --train.max_tokens_per_gpu 8192 \
    --eval.dataset "$EVAL" \
    --eval.temperature 0 \
    --eval.n_samples_per_prompt 1 \
    --eval.before_train \
    --logger.logging_steps 5 \
    --ckpt.output_dir "$OUT" \
    --ckpt.path "$OUT/checkpoints" \
    --ckpt.save_steps "$SAVE_STEPS" \
    --rollout.batch_size 32 \
    --rollout.n_samples_per_prompt 8 \
    --train.batch_size 256 \
    --algo.kl.init_coef 1e-3 \
    "$@"
