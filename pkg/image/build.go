package image

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// DefaultSuite is the Debian release that images are built from: the first one
// that packages compose v2 and lazygit.
const DefaultSuite = "trixie"

// BuildOptions says what to build.
type BuildOptions struct {
	Name         string   // Debian when empty
	Suite        string   // DefaultSuite when empty; "bookworm" works, without compose v2 and lazygit
	Arch         string   // "x86_64" or "aarch64"; the host's when empty, no other can be built
	Mirror       string   // package mirror for this build only; mmdebstrap's default when empty
	Browser      bool     // libraries for Playwright's browsers, about 250 MB
	Provision    fs.FS    // provision/
	GuestProgram []byte   // becomes /usr/local/bin/agent-guest
	Rebuild      bool     // build although an image with the same key exists (newer packages)
	Environ      []string // host's environment: npm registry, proxy and CA settings count for this build only

	Progress func(line string) // one short line at a time; may be nil
}

// maker fills dir with disk, kernel, initrd and cmdline. It may leave other
// things in dir, which are not published.
type maker func(ctx context.Context, dir string, o BuildOptions) error

const (
	workPrefix = ".work-"
	// A root file system, the raw disk made of it and the image exist at once.
	needBytes = 8 << 30
	lockPoll  = 200 * time.Millisecond
)

// Build makes an image and publishes it when it is complete, or returns the one
// that the same inputs made before. Of several callers one builds, the others
// wait and get its result. A build that died leaves work that the next one
// removes; until then Lookup goes on returning the image before.
func (s *Store) Build(ctx context.Context, o BuildOptions) (Info, error) {
	o, err := o.withDefaults()
	if err != nil {
		return Info{}, err
	}
	key, err := o.key()
	if err != nil {
		return Info{}, err
	}
	asked := time.Now()
	if err := os.MkdirAll(s.Dir, 0o755); err != nil {
		return Info{}, fmt.Errorf("make image directory: %w", err)
	}
	lock, err := s.lock(ctx, o)
	if err != nil {
		return Info{}, err
	}
	defer lock.Close()

	built, err := s.built()
	if err != nil {
		return Info{}, err
	}
	for _, i := range built {
		// One made while we waited is as new as a rebuild could be.
		if i.Name == o.Name && i.Arch == o.Arch && i.Key == key && (!o.Rebuild || i.CreatedAt.After(asked)) {
			o.Progress("image is up to date")
			return i, nil
		}
	}
	if err := s.clearWork(o.Name); err != nil {
		return Info{}, err
	}
	if err := s.checkSpace(); err != nil {
		return Info{}, err
	}
	work, err := os.MkdirTemp(s.Dir, workPrefix+o.Name+"-")
	if err != nil {
		return Info{}, fmt.Errorf("make build directory: %w", err)
	}
	defer os.RemoveAll(work) // what stays, the next build removes
	if err := s.maker()(ctx, work, o); err != nil {
		return Info{}, fmt.Errorf("build image %s: %w", o.Name, err)
	}
	return s.publish(work, o, key)
}

func (o BuildOptions) withDefaults() (BuildOptions, error) {
	if o.Name == "" {
		o.Name = Debian
	}
	if o.Suite == "" {
		o.Suite = DefaultSuite
	}
	if o.Arch == "" {
		o.Arch = hostArch()
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	switch {
	case o.Name != Debian:
		return o, fail.New(fail.Usage, "cannot build an image %q: only %q is built from packages", o.Name, Debian)
	case strings.Trim(o.Suite, "abcdefghijklmnopqrstuvwxyz") != "":
		return o, fail.New(fail.Usage, "%q is no name of a Debian release", o.Suite)
	case o.Arch != hostArch():
		return o, fail.New(fail.Usage, "cannot build a %s image on a %s host", o.Arch, hostArch())
	case len(o.GuestProgram) == 0 || o.Provision == nil:
		return o, errors.New("build image: guest program and provision scripts are needed")
	}
	return o, nil
}

// key hashes everything that decides what is in the image, except the packages'
// versions, which Rebuild is for.
func (o BuildOptions) key() (string, error) {
	tree, err := hashTree(o.Provision)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, part := range []string{
		"1", o.Suite, o.Arch, fmt.Sprint(o.Browser), tree, strings.Join(packages(o.Arch), ","),
		cmdline, customizeScript, initramfsHook, string(o.GuestProgram),
	} {
		fmt.Fprintf(h, "%d:%s\n", len(part), part)
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}

func (s *Store) maker() maker {
	if s.make != nil {
		return s.make
	}
	return makeDebian
}

// publish moves the finished files into a directory of their own, makes them
// durable, and renames it into sight.
func (s *Store) publish(work string, o BuildOptions, key string) (Info, error) {
	out := filepath.Join(work, "out")
	if err := os.Mkdir(out, 0o755); err != nil {
		return Info{}, fmt.Errorf("publish image: %w", err)
	}
	for _, f := range []string{diskFile, kernelFile, initrdFile, cmdlineFile} {
		if err := os.Rename(filepath.Join(work, f), filepath.Join(out, f)); err != nil {
			return Info{}, fmt.Errorf("publish image: %w", err)
		}
	}
	i := Info{Name: o.Name, Arch: o.Arch, Source: "debian/" + o.Suite, Key: key, CreatedAt: time.Now().UTC()}
	b, err := json.MarshalIndent(i, "", "  ")
	if err != nil {
		return Info{}, fmt.Errorf("publish image: %w", err)
	}
	if err := os.WriteFile(filepath.Join(out, metaFile), append(b, '\n'), 0o644); err != nil {
		return Info{}, fmt.Errorf("publish image: %w", err)
	}
	for _, f := range []string{diskFile, kernelFile, initrdFile, cmdlineFile, metaFile, "."} {
		if err := syncPath(filepath.Join(out, f)); err != nil {
			return Info{}, err
		}
	}
	final := filepath.Join(s.Dir, fmt.Sprintf("%s-%s-%.12s-%d", o.Name, o.Arch, key, i.CreatedAt.UnixNano()))
	if err := os.Rename(out, final); err != nil {
		return Info{}, fmt.Errorf("publish image: %w", err)
	}
	if err := syncPath(s.Dir); err != nil {
		return Info{}, err
	}
	i, err = readInfo(final)
	if err != nil {
		return Info{}, fmt.Errorf("publish image: %w", err)
	}
	i.Ready = true
	return i, nil
}

// clearWork removes what dead builds of a name left; the caller holds its lock.
func (s *Store) clearWork(name string) error {
	entries, err := readDir(s.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), workPrefix+name+"-") {
			if err := removeTree(filepath.Join(s.Dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *Store) checkSpace() error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.Dir, &st); err != nil {
		return fmt.Errorf("look at free disk space: %w", err)
	}
	if free := int64(st.Bavail) * int64(st.Bsize); free < needBytes { //nolint:unconvert // not int64 on darwin
		return fail.New(fail.Host, "building an image needs %d GiB free in %s, there are %.1f GiB",
			needBytes>>30, s.Dir, float64(free)/(1<<30)).WithHint("agent-sessionizer image prune")
	}
	return nil
}

var errLocked = errors.New("locked by another build")

func (s *Store) lockPath(name string) string { return filepath.Join(s.Dir, ".lock-"+name) }

// lock waits for the builder's lock. The file is never unlinked: another process
// may hold a lock on the unlinked one.
func (s *Store) lock(ctx context.Context, o BuildOptions) (*os.File, error) {
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for first := true; ; first = false {
		f, err := tryLock(s.lockPath(o.Name))
		if !errors.Is(err, errLocked) {
			return f, err
		}
		if first {
			o.Progress("another process builds this image, waiting for it")
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for another build: %w", ctx.Err())
		case <-tick.C:
		}
	}
}

// tryLock returns errLocked when another holds the lock. Closing the file
// releases it, and so does the end of the process.
func tryLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open build lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errLocked
		}
		return nil, fmt.Errorf("take build lock: %w", err)
	}
	return f, nil
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("sync image: %w", err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync image: %w", err)
	}
	return nil
}

// diskUsage is what the files of a tree occupy; sparse files count what they hold.
func diskUsage(dir string) int64 {
	var sum int64
	_ = filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil && unix.Lstat(p, &st) == nil {
			sum += int64(st.Blocks) * 512 //nolint:unconvert // not int64 everywhere
		}
		return nil
	})
	return sum
}

func hostArch() string {
	switch runtime.GOARCH {
	case "amd64":
		return "x86_64"
	case "arm64":
		return "aarch64"
	default:
		return runtime.GOARCH
	}
}
