# Sourced by the scripts of this folder: where Python is, and something small to train where nothing was given.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-$([ -x "$ROOT/.venv/bin/python" ] && echo "$ROOT/.venv/bin/python" || echo python3)}
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
TOY=${TOY:-out/toy}  # where the toy model and its arithmetic questions go
DRY_RUN=${DRY_RUN:-} # 1: print the resolved configuration; build and train nothing

# toy_model: a 0.8 M-parameter model, made from nothing.
toy_model() {
    [ -n "$DRY_RUN" ] || [ -f "$TOY/model/config.json" ] ||
        "$PYTHON" "$ROOT/examples/python/tiny_model.py" "$TOY/model" >&2 || return
    echo "$TOY/model"
}

# toy_data FILE: sums of three digits; half of the demonstrations for SFT are wrong, so that RL has something to do.
toy_data() {
    [ -n "$DRY_RUN" ] || [ -f "$TOY/data/$1" ] ||
        "$PYTHON" "$ROOT/examples/python/make_chain_sum.py" "$TOY/data" --wrong_share 0.5 >&2 || return
    echo "$TOY/data/$1"
}

# toy_policy: the toy model after SFT, because RL needs a policy that is right now and then.
toy_policy() {
    [ -n "$DRY_RUN" ] || [ -f "$TOY/sft/config.json" ] ||
        (unset MODEL DATA EPOCHS LR MAX_LEN TEMPLATE && OUT="$TOY/sft" bash "$ROOT/examples/scripts/train_sft.sh" >&2) || return
    echo "$TOY/sft"
}

# run COMMAND FLAGS...: as a user would.
run() {
    local command=$1
    shift
    [ -z "$DRY_RUN" ] || set -- "$@" --print_config
    exec "$PYTHON" -m "openrlhf_like.cli.$command" "$@"
}
