#!/usr/bin/env bash
# Install SLURM and munge for the tests on a real cluster of two nodes, where that can be done: as root, with apt.
# Elsewhere, and where the packages cannot be had, those tests skip and say why; in continuous integration that is a fault.
set -uo pipefail

PATH=$PATH:${DAEMON_FOLDERS-/usr/sbin:/sbin} # a user's PATH need not have them
missing=
for program in munged slurmctld slurmd sbatch srun; do
    command -v "$program" >/dev/null 2>&1 || missing=yes
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "setup-slurm: not root, or no apt: the tests on a SLURM cluster will skip"
    exit 0
fi

install() {
    # What an image knows of the archive is often too old to install from.
    apt-get update -q && apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=120 slurm-wlm munge
}

echo "setup-slurm: installing slurm-wlm and munge with apt, for the tests on a cluster of two nodes"
export DEBIAN_FRONTEND=noninteractive
for attempt in 1 2 3; do
    log=$(install 2>&1) && exit 0
    [ "$attempt" -eq 3 ] || sleep $((5 * attempt))
done
printf '%s\n' "$log" >&2
echo "setup-slurm: apt could not install them: the tests on a SLURM cluster will skip" >&2
[ -z "${CI:-}" ]
