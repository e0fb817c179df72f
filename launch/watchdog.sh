#!/usr/bin/env bash
# Start a run again when it dies, and when it hangs print what every process was doing. One of these on every node.
#   launch/watchdog.sh runs/quickstart hybrid launch recipes/quickstart.yaml --gpus 8
# RESTARTS: how often at most (3).  SILENCE: seconds without a new line in the run's metrics.jsonl that are a hang (1800;
# longer than train.monitor's log_every steps, validation and a checkpoint take).
# Ends with the command's code: 0 done, 75 asked to stop (saved), 2 a mistake, which no restart puts right.
set -uo pipefail
run=$1 && shift
restarts=${RESTARTS:-3} silence=${SILENCE:-1800}
export PYTHONFAULTHANDLER=1 # SIGABRT prints the stacks of all threads

descendants() {
    local child
    for child in $(pgrep -P "$1"); do
        echo "$child" && descendants "$child"
    done
}

uptime() { # seconds by a clock that nobody sets
    local seconds
    read -r seconds _ </proc/uptime && echo "${seconds%.*}"
}

look() { # notes when the metrics last changed
    local found
    found=$(stat -c "%s %Y %i" "$run/metrics.jsonl" 2>/dev/null)
    if [ "$found" != "$seen" ]; then seen=$found changed=$(uptime); fi
}

print_stacks_and_end() {
    local pid all
    all="$child $(descendants "$child")"
    echo "watchdog: nothing new in $run/metrics.jsonl for $silence s; every process of this node:" >&2
    for pid in $all; do
        if [ -z "$(pgrep -P "$pid")" ]; then # a launcher has children, a rank has none
            echo "watchdog: process $pid" >&2
            kill -ABRT "$pid" 2>/dev/null && kill -CONT "$pid" 2>/dev/null && sleep 1
        fi
    done
    sleep 5
    # shellcheck disable=SC2086  # several process ids
    kill -KILL $all 2>/dev/null
}

for ((attempt = 0; ; attempt++)); do
    seen="" changed=$(uptime)
    "$@" &
    child=$!
    trap 'kill -TERM "$child" 2>/dev/null' TERM INT
    while kill -0 "$child" 2>/dev/null; do
        sleep 1 &
        wait $! # so that a signal is acted on at once
        look
        if [ $(($(uptime) - changed)) -ge "$silence" ]; then print_stacks_and_end; fi
    done
    wait "$child"
    code=$?
    case $code in
    0 | 2 | 75) exit "$code" ;;
    esac
    if [ "$attempt" -ge "$restarts" ]; then
        echo "watchdog: ended with code $code after $restarts restarts" >&2
        exit "$code"
    fi
    echo "watchdog: ended with code $code, starting again ($((attempt + 1)) of $restarts)" >&2
done
