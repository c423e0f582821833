package boot

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// consoles lists the consoles of QEMU on x86, of QEMU on ARM, and of both and vz.
var consoles = []string{"/dev/ttyS0", "/dev/ttyAMA0", "/dev/hvc0"}

// console writes a line that the host reads. It starts with a newline because
// kernel messages may interrupt a line at any time.
func console(line string) {
	for _, path := range consoles {
		f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOCTTY, 0)
		if err != nil {
			continue // this machine has no such console
		}
		// A console without a reader must not block the others.
		_, _ = f.WriteString("\n" + line + "\n")
		_ = f.Close()
	}
}

// announce reports to the host that logins work, and the host key that they will
// see.
func announce(public string) { console(guestproto.ReadyMarker + " " + public) }

// listens reports whether a TCP port accepts connections on any address.
func listens(port int) bool {
	want := fmt.Sprintf(":%04X", port)
	for _, path := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		for line := range strings.Lines(sys.Text(path)) {
			f := strings.Fields(line)
			if len(f) > 3 && strings.HasSuffix(f[1], want) && f[3] == "0A" {
				return true
			}
		}
	}
	return false
}

// findCard waits for the network card and returns its name. A guest has exactly
// one. It triggers the card's uevent again, because networkd waits until udev has
// processed it, and a golden image defers the other devices.
func findCard(ctx context.Context) (string, error) {
	var found []string
	err := sys.Await(ctx, deviceTime, deviceLook, func() (err error) {
		found, err = filepath.Glob("/sys/class/net/*/device")
		if err == nil && len(found) == 0 {
			err = errors.New("no network card")
		}
		return err
	})
	if err != nil {
		return "", err
	}
	dir := filepath.Dir(found[0])
	if err := os.WriteFile(dir+"/uevent", []byte("add"), 0); err != nil {
		return "", err
	}
	return filepath.Base(dir), nil
}

// bringUp sets the card's MAC address, unless mac is nil, and brings the card up.
func bringUp(card string, mac net.HardwareAddr) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if mac != nil {
		if err := setMAC(fd, card, mac); err != nil {
			return fmt.Errorf("%s: set the address: %w", card, err)
		}
	}
	r, err := unix.NewIfreq(card)
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, r); err != nil {
		return fmt.Errorf("%s: %w", card, err)
	}
	r.SetUint16(r.Uint16() | unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r); err != nil {
		return fmt.Errorf("%s: bring it up: %w", card, err)
	}
	return nil
}

// isUp reports whether a card is up.
func isUp(card string) (bool, error) {
	i, err := net.InterfaceByName(card)
	if err != nil {
		return false, err
	}
	return i.Flags&net.FlagUp != 0, nil
}

func setMAC(fd int, card string, mac net.HardwareAddr) error {
	if len(mac) != 6 || len(card) >= unix.IFNAMSIZ {
		return errors.New("must be an Ethernet address")
	}
	var r struct {
		name   [unix.IFNAMSIZ]byte
		family uint16
		data   [14]byte
		_      [8]byte
	}
	copy(r.name[:], card)
	r.family = unix.ARPHRD_ETHER
	copy(r.data[:], mac)
	return ioctl(fd, unix.SIOCSIFHWADDR, unsafe.Pointer(&r))
}

func ioctl(fd int, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
	ext4Resize    = 0x40086610 // EXT4_IOC_RESIZE_FS
)

// reseedRNG reseeds the kernel's random number generator with seed, also for programs
// that are already running.
func reseedRNG(seed []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	// struct rand_pool_info: bits, bytes, data.
	info := binary.NativeEndian.AppendUint32(nil, uint32(len(seed)*8))
	info = binary.NativeEndian.AppendUint32(info, uint32(len(seed)))
	info = append(info, seed...)
	if err := ioctl(int(f.Fd()), rndAddEntropy, unsafe.Pointer(&info[0])); err != nil {
		return err
	}
	return ioctl(int(f.Fd()), rndReseedCRNG, nil)
}

// growRoot grows the mounted root file system to the size of its disk.
func growRoot(ctx context.Context) error {
	var st unix.Stat_t
	if err := unix.Stat("/", &st); err != nil {
		return err
	}
	dev, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	if err != nil {
		return err
	}
	if number, err := os.ReadFile(dev + "/partition"); err == nil {
		// growpart also exits with 1 when there is nothing to grow.
		_, _ = sys.Run(ctx, "", "growpart", "/dev/"+filepath.Base(filepath.Dir(dev)), strings.TrimSpace(string(number)))
	}
	sectors, err := os.ReadFile(dev + "/size")
	if err != nil {
		return err
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(sectors)), 10, 64)
	if err != nil {
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs("/", &fs); err != nil {
		return err
	}
	if fs.Type != unix.EXT4_SUPER_MAGIC {
		return nil // other file systems grow on their own, or not at all
	}
	root, err := os.Open("/")
	if err != nil {
		return err
	}
	defer root.Close()
	blocks := n * 512 / uint64(fs.Bsize)
	return ioctl(int(root.Fd()), ext4Resize, unsafe.Pointer(&blocks))
}

const (
	idleLook = 500 * time.Millisecond
	idleTime = 30 * time.Second
)

// waitIdle waits until the machine is mostly idle, or for idleTime at most, so
// that background work does not delay a login.
func waitIdle(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, idleTime)
	defer cancel()
	idle, all := cpuTime()
	tick := time.NewTicker(idleLook)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			i, a := cpuTime()
			if 4*(i-idle) > 3*(a-all) {
				return
			}
			idle, all = i, a
		}
	}
}

// cpuTime returns the idle time of the machine's processors and their total time.
func cpuTime() (idle, all uint64) {
	first, _, _ := strings.Cut(sys.Text("/proc/stat"), "\n")
	for i, word := range strings.Fields(first) {
		n, err := strconv.ParseUint(word, 10, 64)
		if err != nil || i > 8 {
			continue // the line's label; guest time is already counted elsewhere
		}
		all += n
		if i == 4 || i == 5 { // idle and iowait
			idle += n
		}
	}
	return idle, all
}
