package image

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/rules"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// DefaultSuite is the Debian release that images are built from. It is the first
// release that packages compose v2 and lazygit.
const DefaultSuite = "trixie"

// BuildOptions defines what to build.
type BuildOptions struct {
	Name         string   // Debian if empty
	Suite        string   // DefaultSuite if empty; "bookworm" works, but without compose v2 and lazygit
	Arch         string   // "x86_64" or "aarch64"; the host's if empty
	Mirror       string   // package mirror for this build only; mmdebstrap's default if empty
	Browser      bool     // libraries for Playwright's browsers, about 250 MB
	Provision    fs.FS    // provision/
	GuestProgram []byte   // installed as /usr/local/bin/agent-guest
	Rebuild      bool     // build even if an image with the same key exists, to get newer packages
	Environ      []string // the host's environment: npm registry, proxy and CA settings apply to this build only

	Progress func(line string) // receives one short line at a time; may be nil
}

// builder fills dir with the disk, kernel, initrd and cmdline. It may leave other files
// in dir, which are not published.
type builder func(ctx context.Context, dir string, o BuildOptions) error

// needBytes is the space for a root file system, the raw disk made from it and the
// image, which exist at the same time.
const needBytes = 8 << 30

// Build makes an image and publishes it when it is complete, or returns the image that
// was made earlier from the same inputs. Of several callers one builds; the others wait
// and get its result. The next build removes the leftovers of a build that died. Until
// a new image is published, Lookup returns the previous one.
func (s *Store) Build(ctx context.Context, o BuildOptions) (Info, error) {
	o, err := o.withDefaults()
	if err != nil {
		return Info{}, err
	}
	key, err := o.key()
	if err != nil {
		return Info{}, err
	}
	i := Info{Name: o.Name, Arch: o.Arch, Source: "debian/" + o.Suite, Key: key, Files: []string{diskFile, KernelFile, InitrdFile, CmdlineFile}}
	return s.Make(ctx, i, MakeOptions{Space: needBytes, Again: o.Rebuild, Progress: o.Progress}, func(ctx context.Context, dir string) ([]string, error) {
		o.Progress = s.Reporter(i.Name, time.Now(), o.Progress)
		return i.Files, s.builder()(ctx, dir, o)
	})
}

func (o BuildOptions) withDefaults() (BuildOptions, error) {
	if o.Name == "" {
		o.Name = Debian
	}
	if o.Suite == "" {
		o.Suite = DefaultSuite
	}
	if o.Arch == "" {
		o.Arch = vm.HostArch()
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	switch {
	case o.Name != Debian:
		return o, fail.New(fail.Usage, "cannot build an image %q: only %q is built from packages", o.Name, Debian)
	case strings.Trim(o.Suite, "abcdefghijklmnopqrstuvwxyz") != "":
		return o, fail.New(fail.Usage, "--suite must be the name of a Debian release, got %q", o.Suite)
	case !slices.Contains(vm.Archs, o.Arch):
		return o, fail.New(fail.Usage, "cannot build an image for %s: only for %s", o.Arch, strings.Join(vm.Archs, " and "))
	case len(o.GuestProgram) == 0 || o.Provision == nil:
		return o, errors.New("build image: guest program and provision scripts must be set")
	}
	return o, nil
}

// key hashes everything that determines the content of the image, with two exceptions.
// Package versions do not count; use Rebuild to update them. Of the guest program only
// the firewall rules count that it boots with, because every session and every golden
// image gets the current program.
func (o BuildOptions) key() (string, error) {
	tree, err := hashTree(o.Provision, "golden") // used only in running guests
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, part := range []string{
		"1", o.Suite, o.Arch, fmt.Sprint(o.Browser), tree, strings.Join(packages(o.Arch), ","),
		cmdline(o.Arch), customizeScript, initramfsHook, rules.LockdownScript(),
	} {
		fmt.Fprintf(h, "%d:%s\n", len(part), part)
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}

func (s *Store) builder() builder {
	if s.make != nil {
		return s.make
	}
	return makeDebian
}

// DiskUsage returns the disk space that a file or a tree of files occupies, in bytes.
// Holes in sparse files do not count.
func DiskUsage(dir string) int64 {
	var sum int64
	_ = filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil && unix.Lstat(p, &st) == nil {
			sum += int64(st.Blocks) * 512 //nolint:unconvert // not int64 on every platform
		}
		return nil
	})
	return sum
}
