#!/bin/sh
# Installs Swerve below /opt/swerve, for the Dockerfile and for swerve.def: install.sh SOURCE
#
# SOURCE is the checkout, in its place below /opt/swerve. The environment says the rest: SOURCE_COMMIT, which commit it is;
# BASE_IMAGE, name and digest of the image underneath; EXTRAS, any of "tpu cuda ray".
set -eu
source=$1
home=$(dirname "$source")

case ${SOURCE_COMMIT:-} in
  *[!0-9a-f]* | '') echo "SOURCE_COMMIT must be the full name of a commit: build with make image" >&2; exit 1 ;;
esac
[ ${#SOURCE_COMMIT} -eq 40 ] || { echo "SOURCE_COMMIT must be the 40 digits of a commit, not $SOURCE_COMMIT" >&2; exit 1; }
case ${BASE_IMAGE:-} in
  *@sha256:*) ;;
  *) echo "BASE_IMAGE must name its digest, such as python@sha256:...: not '${BASE_IMAGE:-}'" >&2; exit 1 ;;
esac

set -- -r "$source/requirements.lock"
for extra in ${EXTRAS:-}; do
  lock=$source/containers/locks/$extra.lock
  [ -f "$lock" ] || { echo "EXTRAS: there is no $extra: choose among tpu, cuda, ray" >&2; exit 1; }
  set -- "$@" -r "$lock"
done

python3 -m venv "$home/venv"
pip="$home/venv/bin/python -m pip --disable-pip-version-check --no-cache-dir --quiet"
$pip install --require-hashes "$@"
$pip install --no-deps --no-build-isolation "$source"
"$home/venv/bin/python" "$source/containers/provenance.py" "$source" >"$home/provenance.json"
# Recipes stay to be run; the rest of the checkout now lies in the environment.
mv "$source/recipes" "$home/recipes"
rm -rf "$source"
chmod -R go+rX "$home"
"$home/venv/bin/swerve" --version
