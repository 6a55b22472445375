#!/bin/bash
# lab.sh N CMD...   runs CMD with N hosts 10.77.0.1..N on this machine, each reachable as `ssh root@10.77.0.K`.
#
# A host is a set of namespaces (net, mount, pid, uts, ipc) with an sshd, /tmp, /run, /dev/shm and HOME of its
# own, joined to the others by a bridge. All of it lives in one outer set of namespaces: when CMD ends, or this
# is killed, the kernel removes everything. Inside CMD:
#   $LAB in K CMD...     runs CMD on host K         $LAB cut K      ends host K as a power cut would
#   $LAB boot K          starts it again, its disk blank
# The client's key is /run/lab/id. Needs root, util-linux, iproute2, openssh and rsync. ROOT = the project,
# VENV = its virtual environment; both are visible on all hosts, and must lie neither in /tmp nor in /run.
set -eu
NET=10.77.0
SELF=$(readlink -f "$0")

wait_for() { # SECONDS/20 CMD...: until CMD succeeds
    local tries=$1; shift
    for _ in $(seq "$tries"); do "$@" 2>/dev/null && return; sleep 0.05; done
    return 1
}

has_child() { [ -n "$(cat "/proc/$1/task/$1/children")" ]; }

has_sshd() { timeout 0.3 bash -c ": </dev/tcp/$NET.$1/22"; }

has_address() { ip -4 addr show dev eth0 | grep -q inet; }

boot() { # K
    local k=$1 outer inner
    setsid unshare --net --pid --mount --uts --ipc --fork --kill-child --mount-proc \
        bash "$SELF" --host "$k" </dev/null >"/run/lab/host$k.log" 2>&1 &
    outer=$!
    wait_for 100 has_child $outer || { echo "host $k does not start" >&2; return 1; }
    inner=$(tr -d ' ' <"/proc/$outer/task/$outer/children")
    echo $outer >"/run/lab/host$k.unshare"; echo "$inner" >"/run/lab/host$k.pid"
    # A fixed MAC: a host that comes back is not looked for at its old one.
    ip link add "v$k" type veth peer name eth0 address "02:00:00:00:00:$(printf %02x "$k")" netns "$inner"
    ip link set "v$k" master br0 up
    nsenter -t "$inner" -n sh -c "ip link set lo up; ip addr add $NET.$k/24 dev eth0; ip link set eth0 up
        ip route add default via $NET.254"
    wait_for 200 has_sshd "$k" || { echo "host $k has no sshd" >&2; cat "/run/lab/host$k.log" >&2; return 1; }
}

host() { # pid 1 of host K
    hostname "host$1"
    mount -t tmpfs -o size=2g,mode=1777 tmpfs /tmp
    mount -t tmpfs -o size=512m,mode=1777 tmpfs /dev/shm
    mkdir /tmp/.host; cp /run/lab/{host_key,id.pub,sshd_config,passwd,bashrc} /tmp/.host/
    mount -t tmpfs -o mode=755 tmpfs /run
    mkdir /run/sshd; mkdir -m 700 /run/home; mv /tmp/.host /run/host; chmod 600 /run/host/host_key
    cp /run/host/bashrc /run/home/.bashrc
    mount --bind /run/host/passwd /etc/passwd
    cd /
    wait_for 100 has_address
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin /usr/sbin/sshd -D -e -f /run/host/sshd_config &
    while :; do wait -n 2>/dev/null || sleep 1; done # reap orphans
}

outer() { # N CMD...
    local n=$1 k starts=(); shift
    mount -t tmpfs -o mode=755 tmpfs /run
    mkdir /run/lab; cp "$SELF" /run/lab/lab.sh; SELF=/run/lab/lab.sh
    mount -t tmpfs -o mode=1777 tmpfs /tmp
    ssh-keygen -q -t ed25519 -N '' -f /run/lab/id -C lab
    ssh-keygen -q -t ed25519 -N '' -f /run/lab/host_key -C lab
    cat >/run/lab/sshd_config <<X
HostKey /run/host/host_key
AuthorizedKeysFile /run/host/id.pub
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
MaxSessions 100
X
    sed 's#^root:\([^:]*\):0:0:\([^:]*\):[^:]*:#root:\1:0:0:\2:/run/home:#' /etc/passwd >/run/lab/passwd
    # Ray's ssh sessions read it. The function stands for the installed command.
    cat >/run/lab/bashrc <<X
export PATH=$VENV/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH=$ROOT RAY_USAGE_STATS_ENABLED=0
headway() { python -m cluster.cli "\$@"; }
export -f headway
X
    ip link set lo up; ip link add br0 type bridge; ip addr add $NET.254/24 dev br0; ip link set br0 up
    for k in $(seq "$n"); do boot "$k" & starts+=($!); done
    for k in "${starts[@]}"; do wait "$k"; done
    unset TMPDIR RAY_TMPDIR RAY_ADDRESS
    mkdir /tmp/home
    export LAB="bash $SELF --control" HOME=/tmp/home RAY_USAGE_STATS_ENABLED=0
    cd "$ROOT"
    "$@"
}

control() { # VERB K CMD...
    local verb=$1 k=$2; shift 2
    case $verb in
    in) exec nsenter -t "$(cat "/run/lab/host$k.pid")" -n -p -m -u -i -- env -i HOME=/run/home TERM=dumb \
        bash --login -c 'source ~/.bashrc; "$@"' - "$@" ;;
    cut) kill -9 "$(cat "/run/lab/host$k.unshare")"; ip link del "v$k" 2>/dev/null || true ;;
    boot) boot "$k" ;;
    esac
}

case ${1-} in
--outer) shift; outer "$@" ;;
--host) host "$2" ;;
--control) shift; control "$@" ;;
*) exec unshare --net --mount --pid --ipc --uts --fork --kill-child --mount-proc bash "$SELF" --outer "$@" ;;
esac
