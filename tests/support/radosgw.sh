#!/usr/bin/env bash
# Ceph's RADOS Gateway on loopback for tests: a real S3 server over one in-memory OSD. It checks signatures, ranges and
# conditional requests, and gives sessions that end (STS). Up in about 15 s, about 110 MB.
#
#   radosgw.sh unpack ROOT        Debian 12's packages under ROOT; nothing is installed. Then export RADOSGW_ROOT=ROOT
#   radosgw.sh start DIR PORT     monitor, OSD, gateway, a user; PORT and PORT + 1 must be free
#   radosgw.sh gateway DIR        the gateway alone again, after it was killed; the objects are the OSD's
#   radosgw.sh rot DIR KEY        other bytes under an object of at most 4 MiB, its size and ETag left as they are
#   radosgw.sh admin DIR ...      radosgw-admin
#   radosgw.sh stop DIR
set -euo pipefail
verb=$1 dir=$2
packages="radosgw ceph-mon ceph-osd ceph-base ceph-common librados2 librgw2 librbd1 libcephfs2 libradosstriper1
  python3-ceph-argparse python3-ceph-common python3-rados python3-cephfs python3-rbd python3-rgw python3-prettytable
  python3-wcwidth python3-yaml libaio1 libboost-context1.74.0 libboost-thread1.74.0 libdaxctl1 libfmt9 libfuse2
  libgoogle-perftools4 libtcmalloc-minimal4 libibverbs1 libinih1 libleveldb1d liblua5.3-0 libndctl6 libnl-3-200
  libnl-route-3-200 libnvme1 liboath0 libpmem1 librabbitmq4 librdmacm1 libsnappy1v5 liburcu8"

if [[ $verb == unpack ]]; then
  mkdir -p "$dir/debs"
  # shellcheck disable=SC2086
  (cd "$dir/debs" && apt-get download -q $packages)
  for deb in "$dir"/debs/*.deb; do dpkg -x "$deb" "$dir"; done
  exit
fi

root=${RADOSGW_ROOT:-}
lib=$root/usr/lib/x86_64-linux-gnu
if [[ -n $root ]]; then
  export LD_LIBRARY_PATH=$lib:$lib/ceph:$root/lib/x86_64-linux-gnu PATH=$root/usr/bin:$PATH
  export PYTHONPATH=$root/usr/lib/python3/dist-packages
fi
conf="-c $dir/ceph.conf"

start_gateway() {
  # shellcheck disable=SC2086
  radosgw $conf -n client.rgw.a
  local port
  port=$(sed -n 's/.*endpoint=127.0.0.1://p' "$dir/ceph.conf")
  for _ in $(seq 300); do curl -s -o /dev/null "http://127.0.0.1:$port" && return; sleep 0.2; done
  return 1
}

write_conf() {
  local port=$1
  cat >"$dir/ceph.conf" <<C
[global]
fsid=$(cat /proc/sys/kernel/random/uuid)
mon_host=[v1:127.0.0.1:$((port + 1))]
public_addr=127.0.0.1
cluster_addr=127.0.0.1
ms_bind_msgr2=false
ms_bind_msgr1=true
ms_mon_client_mode=crc
auth_cluster_required=none
auth_service_required=none
auth_client_required=none
osd_pool_default_size=1
osd_pool_default_min_size=1
osd_pool_default_pg_num=4
osd_pool_default_pgp_num=4
osd_pool_default_pg_autoscale_mode=off
mon_allow_pool_size_one=true
mon_max_pg_per_osd=4000
osd_crush_chooseleaf_type=0
run_dir=$dir
admin_socket=$dir/\$name.asok
log_file=$dir/log/\$name.log
pid_file=$dir/\$name.pid
mon_data=$dir/mon
osd_data=$dir/osd
osd_objectstore=memstore
memstore_device_bytes=4G
osd_class_dir=$lib/rados-classes
erasure_code_dir=$lib/ceph/erasure-code
plugin_dir=$lib/ceph
mon_data_avail_crit=1
mon_data_avail_warn=2
rgw_frontends=beast endpoint=127.0.0.1:$port
rgw_data=$dir
rgw_dns_name=localhost
rgw_s3_auth_use_sts=true
rgw_sts_key=0123456789abcdef
rgw_sts_min_session_duration=1
[client]
keyring=/dev/null
C
}

start() {
  local port=$1
  mkdir -p "$dir"/{mon,osd,log}
  write_conf "$port"
  # shellcheck disable=SC2086
  {
    monmaptool --create --addv a "[v1:127.0.0.1:$((port + 1))]" \
      --fsid "$(sed -n 's/^fsid=//p' "$dir/ceph.conf")" "$dir/monmap"
    ceph-mon $conf -i a --mkfs --monmap "$dir/monmap" --keyring /dev/null
    ceph-mon $conf -i a
    local osd
    osd=$(cat /proc/sys/kernel/random/uuid)
    /usr/bin/python3 "$(command -v ceph)" $conf osd new "$osd"
    ceph-osd $conf -i 0 --mkfs --osd-uuid "$osd"
    for _ in $(seq 10); do ceph-osd $conf -i 0 && break; sleep 0.5; done  # a young monitor may refuse it
    start_gateway
    radosgw-admin $conf user create --uid=test --display-name=test --access-key=test-key --secret-key=test-secret
  } >"$dir/start.log" 2>&1 || { tail -n 20 "$dir/start.log" >&2; exit 1; }
}

case $verb in
  start) start "$3" ;;
  gateway) start_gateway ;;
  # shellcheck disable=SC2086
  rot)
    name=$(rados $conf -p default.rgw.buckets.data ls | grep -F -- "_$3" | head -n 1)
    rados $conf -p default.rgw.buckets.data get "$name" "$dir/rotten"
    printf 'XXXXXXXX' | dd of="$dir/rotten" bs=1 seek=0 conv=notrunc status=none
    rados $conf -p default.rgw.buckets.data put "$name" "$dir/rotten"
    ;;
  # shellcheck disable=SC2086
  admin) shift 2 && radosgw-admin $conf "$@" ;;
  stop) for file in "$dir"/*.pid; do [[ -f $file ]] && kill "$(cat "$file")" 2>/dev/null || true; done ;;
  *) echo "unknown verb $verb" >&2; exit 2 ;;
esac
