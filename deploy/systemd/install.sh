#!/bin/sh
# Installs the systemd units and their configuration, or removes them.
#
#   PREFIX=/opt/slipstream DESTDIR= install.sh install | uninstall
#
# PREFIX is the virtual environment with rl-trainer and rl-producer. DESTDIR is put before every path that is written.
# What is configuration (*.env, run.yaml, keys) is never overwritten and never removed; neither is /var/lib/slipstream.
set -eu

here=$(dirname "$0")
prefix=${PREFIX:-/opt/slipstream}
root=${DESTDIR:-}
lib=/usr/local/lib
etc=/etc/slipstream

units='rl-trainer.service rl-producer@.service rl.target rl.slice'
services='rl-trainer.service rl-producer@.service'

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

put() { # SOURCE TARGET MODE
    install -D -m "$3" "$here/$1" "$root$2"
    sed -i "s|@PREFIX@|$prefix|g" "$root$2"
}

installed() { # every file that belongs to the release, and not to the user
    for unit in $units; do echo "$lib/systemd/system/$unit"; done
    for service in $services; do echo "$lib/systemd/system/$service.d/10-common.conf"; done
    echo "$lib/sysusers.d/slipstream.conf"
    echo "$lib/tmpfiles.d/slipstream.conf"
    echo "$etc/run.example.yaml"
}

on_this_system() {
    [ -z "$root" ] && [ -d /run/systemd/system ]
}

install_all() {
    case $prefix in
        /home/* | /root/* | /run/user/*) fail "PREFIX=$prefix: the units cannot see /home and /root; use /opt/slipstream" ;;
        /*[!A-Za-z0-9/._+-]*) fail "PREFIX=$prefix: letters, digits and /._+- only" ;;
        /*) ;;
        *) fail "PREFIX=$prefix: expected an absolute path" ;;
    esac
    for unit in $units; do put "$unit" "$lib/systemd/system/$unit" 644; done
    for service in $services; do put common.conf "$lib/systemd/system/$service.d/10-common.conf" 644; done
    put sysusers.d/slipstream.conf "$lib/sysusers.d/slipstream.conf" 644
    put tmpfiles.d/slipstream.conf "$lib/tmpfiles.d/slipstream.conf" 644
    put config/run.example.yaml "$etc/run.example.yaml" 644
    for name in trainer.env producer.env; do # may hold tokens; the service manager reads them
        [ -e "$root$etc/$name" ] || put "config/$name" "$etc/$name" 600
    done
    install -d -m 755 "$root$etc/keys"
    if [ -z "$root" ]; then
        systemd-sysusers "$lib/sysusers.d/slipstream.conf"
        systemd-tmpfiles --create "$lib/tmpfiles.d/slipstream.conf"
    fi
    if on_this_system; then systemctl daemon-reload; fi
    echo "installed. Next: $etc/run.yaml (see run.example.yaml), then"
    echo "  systemctl enable --now rl.target rl-trainer rl-producer@0"
    for program in rl-trainer rl-producer; do
        [ -x "$root$prefix/bin/$program" ] || echo "note: $prefix/bin/$program is not there yet"
    done
}

uninstall_all() {
    if on_this_system && [ -n "$(systemctl list-units --plain --no-legend --state=active,activating,deactivating 'rl-trainer.service' 'rl-producer@*.service')" ]; then
        fail "still running; first: systemctl disable --now rl.target rl-trainer and every rl-producer@"
    fi
    installed | while read -r file; do rm -f "$root$file"; done
    for service in $services; do
        rmdir --ignore-fail-on-non-empty "$root$lib/systemd/system/$service.d" 2>/dev/null || true
    done
    if on_this_system; then systemctl daemon-reload; fi
    echo "uninstalled. Left: $etc, /var/lib/slipstream with the run, /var/cache/slipstream, user slipstream, $prefix"
}

case ${1:-} in
    install) install_all ;;
    uninstall) uninstall_all ;;
    *) fail "expected install or uninstall" ;;
esac
