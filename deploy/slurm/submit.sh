#!/usr/bin/env bash
# Makes keys in keys/ and submits the run. Producers begin after the trainer. A producer that was revoked stays revoked.
#   ./submit.sh PRODUCERS       the trainer and this number of producers
#   ./submit.sh --more 6-9      producers 6 to 9, while the run goes on
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./settings.sh

if [ "${1:-1}" = --more ]; then array=$2; else array=0-$((${1:-1} - 1)); fi
[ -e keys/trainer.secret ] || slipstream keys generate trainer
for ((number = ${array%-*}; number <= ${array#*-}; number++)); do
  [ -e "keys/producer-$number.secret" ] && continue
  slipstream keys generate "producer-$number"
  slipstream keys authorize "producer-$number"
done
after=()
if [ "${1:-1}" != --more ]; then
  trainer=$(sbatch --parsable trainer.sbatch)
  after=("--dependency=after:${trainer%%;*}")
  echo "trainer: job ${trainer%%;*}"
fi
producers=$(sbatch --parsable "${after[@]}" "--array=$array" producers.sbatch)
echo "producers: job ${producers%%;*}; logs are in $PWD"
