//go:build !linux || !amd64

package lima

import "os"

// probeKVM only looks whether KVM is there: on other architectures QEMU's
// opinion is the only one.
func probeKVM() string {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return err.Error()
	}
	f.Close()
	return ""
}
