module github.com/lima-vm/lima

go 1.26.0

require (
	github.com/Code-Hex/vz/v3 v3.7.0
	github.com/apparentlymart/go-cidr v1.1.0
	github.com/balajiv113/fd v0.0.0-20230330094840-143eec500f3e
	github.com/containerd/continuity v0.4.5
	github.com/containers/gvisor-tap-vsock v0.8.6
	github.com/coreos/go-semver v0.3.1
	github.com/digitalocean/go-qemu v0.0.0-20221209210016-f035778c97f7
	github.com/diskfs/go-diskfs v1.6.0
	github.com/docker/go-units v0.5.0
	github.com/goccy/go-yaml v1.19.2
	github.com/lima-vm/go-qcow2reader v0.6.0
	github.com/lima-vm/sshocker v0.3.8
	github.com/mattn/go-isatty v0.0.24
	github.com/mattn/go-shellwords v1.0.12
	github.com/miekg/dns v1.1.73
	github.com/nxadm/tail v1.4.11
	github.com/opencontainers/go-digest v1.0.0
	github.com/pbnjay/memory v0.0.0-20210728143218-7b4eea64cf58
	github.com/sethvargo/go-password v0.3.1
	github.com/sirupsen/logrus v1.9.4-0.20230606125235-dd1b4c2e81af
	go.yaml.in/yaml/v3 v3.0.5
	golang.org/x/sync v0.24.0
	golang.org/x/sys v0.49.0
	golang.org/x/text v0.43.0
)
