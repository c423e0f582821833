package boot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"golang.org/x/sys/unix"
)

// initrdModules names the file in a golden image's initrd that lists the modules to
// load, in order.
const initrdModules = "/agent/modules"

// InInitrd reports whether the program runs as init in a golden image's initrd.
func InInitrd() bool {
	_, err := os.Stat(initrdModules)
	return err == nil && os.Getpid() == 1
}

// Initrd mounts the root file system and executes its init. It is a single process
// where a shell would start a dozen, each of which costs time under emulation. It
// returns only with an error, on which the kernel panics and the machine ends.
func Initrd() error {
	err := bootRoot(context.Background())
	fmt.Fprintf(os.Stderr, "agent-sessionizer: cannot boot: %v\n", err)
	return err
}

func bootRoot(ctx context.Context) error {
	// The initrd contains /dev/null and /dev/console; devtmpfs adds the disks.
	if err := unix.Mount("dev", "/dev", "devtmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("mount /dev: %w", err)
	}
	if err := os.MkdirAll("/proc", 0o755); err != nil {
		return err
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	words, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	device, options := rootOf(string(words))
	if device == "" {
		return errors.New("the kernel's command line names no root=/dev/…")
	}
	list, err := os.ReadFile(initrdModules)
	if err != nil {
		return err
	}
	for name := range strings.FieldsSeq(string(list)) {
		if err := loadModule("/agent/" + name); err != nil {
			// If the root needs this module, the mount below fails and reports it.
			fmt.Fprintf(os.Stderr, "agent-sessionizer: %v\n", err)
		}
	}
	if err := os.MkdirAll("/root", 0o755); err != nil {
		return err
	}
	err = sys.Await(ctx, deviceTime, time.Millisecond, func() error {
		return unix.Mount(device, "/root", "ext4", unix.MS_NOATIME, options)
	})
	if err != nil {
		return fmt.Errorf("mount %s: %w", device, err)
	}
	// Free the initrd's memory, then switch to the root file system.
	if err := errors.Join(os.RemoveAll("/agent"), os.Remove("/init"), unix.Unmount("/proc", 0)); err != nil {
		return err
	}
	if err := unix.Mount("/dev", "/root/dev", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move /dev: %w", err)
	}
	if err := errors.Join(os.Chdir("/root"), unix.Mount(".", "/", "", unix.MS_MOVE, ""), unix.Chroot("."), os.Chdir("/")); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	return unix.Exec("/sbin/init", []string{"/sbin/init"}, []string{"HOME=/", "TERM=linux"})
}

// rootOf returns the root device and its mount options from the kernel's command
// line.
func rootOf(cmdline string) (device, options string) {
	for word := range strings.FieldsSeq(cmdline) {
		if v, ok := strings.CutPrefix(word, "root="); ok && strings.HasPrefix(v, "/dev/") {
			device = v
		}
		if v, ok := strings.CutPrefix(word, "rootflags="); ok {
			options = v
		}
	}
	return device, options
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load %s: %w", path, err)
	}
	return nil
}
