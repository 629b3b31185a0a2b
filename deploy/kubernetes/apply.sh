#!/usr/bin/env bash
# Makes keys in keys/, hands them to the cluster as Secrets, and applies the manifests. A producer that was revoked stays revoked.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
namespace=$(sed -n 's/^namespace: \([^ ]*\).*/\1/p' kustomization.yaml)
producers=$(sed -n 's/^  completions: \([0-9]*\).*/\1/p' producers.yaml)

[ -e keys/trainer.secret ] || slipstream keys generate trainer
for ((number = 0; number < producers; number++)); do
  [ -e "keys/producer-$number.secret" ] && continue
  slipstream keys generate "producer-$number"
  slipstream keys authorize "producer-$number"
done

secret() { # NAME FILE...
  local name=$1 files=()
  shift
  for file in "$@"; do files+=("--from-file=$file"); done
  kubectl create secret generic "$name" --namespace="$namespace" "${files[@]}" --dry-run=client --output=yaml | kubectl apply --filename=-
}
secret slipstream-trainer-key keys/trainer.secret
secret slipstream-authorized keys/authorized/*.public
secret slipstream-producer-keys keys/trainer.public keys/producer-*.secret
kubectl apply --kustomize=.
