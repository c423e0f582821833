//go:build !linux || !amd64

package lima

import "os"

// probeKVM only checks whether KVM exists: on other architectures only QEMU is asked.
func probeKVM() string {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return err.Error()
	}
	f.Close()
	return ""
}
