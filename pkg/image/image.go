// Package image owns the disk images that sessions start from: it finds the
// pinned Ubuntu cloud image in the VM template, builds images from Debian
// packages, keeps golden images and saved states that others make, and lists and
// removes them all.
//
// It never starts a VM and never downloads a cloud image; the driver does both. A
// cloud image of the user's own is read here only for its digest.
// A published image is complete and never changes: a newer build is a new one
// beside it. Only saved states are added to it, and removed.
package image

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// The names of images.
const (
	Ubuntu = "ubuntu" // the cloud image that the VM template pins
	Debian = "debian" // built here by Build
)

// goldenSuffix ends the names of golden images.
const goldenSuffix = ".golden"

// Golden is the name of the image that is made from the image source by booting
// and provisioning it once, so that its clones need not.
func Golden(source string) string { return SourceName(source) + goldenSuffix }

// GoldenOf is the name of the image that a golden one of a name was made from.
func GoldenOf(name string) (source string, ok bool) { return strings.CutSuffix(name, goldenSuffix) }

// Info describes one image.
type Info struct {
	Name      string    `json:"name"`
	Arch      string    `json:"arch"`
	Source    string    `json:"source"` // "debian/trixie", the URL of a cloud image, or the image that a golden one was made from
	Key       string    `json:"key"`    // hash of everything that goes in; a cloud image's digest
	Size      int64     `json:"size"`   // bytes on disk, saved states included; 0 for a cloud image
	CreatedAt time.Time `json:"created_at,omitzero"`
	Path      string    `json:"path,omitempty"` // directory; "" for a cloud image
	Ready     bool      `json:"ready"`          // this is the one that Lookup returns
	Files     []string  `json:"files,omitempty"`
	Warm      []Warm    `json:"warm,omitempty"`
}

// Warm is the state of a VM that was booted from an image and saved: sessions of
// its CPUs and memory go on from there.
type Warm struct {
	Key       string    `json:"key"` // vm.Saver.StateKey
	CPUs      int       `json:"cpus"`
	Memory    int64     `json:"memory"` // bytes
	Size      int64     `json:"size"`   // bytes on disk
	CreatedAt time.Time `json:"created_at"`
	Path      string    `json:"path"` // directory
}

// Image is i, ready for a driver's Spec.
func (i Info) Image() (vm.Image, error) {
	img := vm.Image{Arch: i.Arch, Location: filepath.Join(i.Path, diskFile)}
	if slices.Contains(i.Files, KernelFile) { // else it brings its own boot loader
		img.Kernel = filepath.Join(i.Path, KernelFile)
	}
	if slices.Contains(i.Files, InitrdFile) {
		img.Initrd = filepath.Join(i.Path, InitrdFile)
	}
	if slices.Contains(i.Files, CmdlineFile) {
		text, err := os.ReadFile(filepath.Join(i.Path, CmdlineFile))
		if err != nil {
			return vm.Image{}, fmt.Errorf("read image %s: %w", i.Name, err)
		}
		img.Cmdline = strings.TrimSpace(string(text))
	}
	return img, nil
}

// Resumed is i's image as the VM that was saved in w left it.
func (i Info) Resumed(w Warm) (vm.Image, error) {
	img, err := i.Image()
	img.Location, img.State = filepath.Join(w.Path, vm.DiskFile), filepath.Join(w.Path, vm.StateFile)
	return img, err
}

// Store is a directory of images. Its methods may be called at once from
// several processes.
type Store struct {
	Dir      string // made when needed
	Template []byte // the VM template, whose images are the source "ubuntu"; may be nil

	make builder // nil: makeDebian
}

// The files of an image's directory, besides vm.DiskFile.
const (
	diskFile    = vm.DiskFile
	KernelFile  = "kernel"
	InitrdFile  = "initrd"
	CmdlineFile = "cmdline"
	metaFile    = "meta.json" // written last: its presence means complete
)

// A published directory is NAME-ARCH-KEY-TIME; anything that begins with a dot
// is a lock, or work that is in progress or was cut short.
var published = regexp.MustCompile(`^[a-z0-9.]+-(x86_64|aarch64)-[0-9a-f]{12}-[0-9]+$`)

// List returns the cloud images of the template and every built image, newest
// first within a name. A damaged directory is left out: Prune removes it.
func (s *Store) List() ([]Info, error) {
	infos, err := cloudImages(s.Template)
	if err != nil {
		return nil, err
	}
	built, err := s.built()
	if err != nil {
		return nil, err
	}
	return append(infos, built...), nil
}

// Find returns what is known of the newest image of a source and architecture: one
// of the store's, by its name, or a cloud image of the user's own.
func (s *Store) Find(source, arch string) (Info, error) {
	ref, err := Resolve(source)
	if err != nil {
		return Info{}, err
	}
	if ref.Location != "" {
		return Info{Name: SourceName(ref.String()), Arch: arch, Source: ref.Location, Key: ref.Digest, Ready: true}, nil
	}
	name := ref.Name
	all, err := s.List()
	if err != nil {
		return Info{}, err
	}
	for _, i := range all {
		if i.Name == name && i.Arch == arch && i.Ready {
			return i, nil
		}
	}
	return Info{}, notFound(name, arch)
}

func notFound(name, arch string) error {
	e := fail.New(fail.NotFound, "no image %q for %s", name, arch)
	if name == Debian {
		return e.WithHint("agent-sessionizer image build --from debian")
	}
	return e.WithHint("agent-sessionizer image list")
}

// Lookup is Find's image, ready for a driver's Spec.
func (s *Store) Lookup(source, arch string) (vm.Image, error) {
	if source == Ubuntu {
		return cloudImage(s.Template, arch)
	}
	i, err := s.Find(source, arch)
	if err != nil {
		return vm.Image{}, err
	}
	if i.Path == "" {
		return vm.Image{Arch: arch, Location: i.Source, Digest: i.Key}, nil
	}
	return i.Image()
}

// Remove deletes every built image of a name. None is a success; one that VMs'
// disks refer to, whose directory inUse confirms, keeps all. inUse may be nil.
func (s *Store) Remove(name string, inUse func(dir string) bool) error {
	if name == Ubuntu {
		return fail.New(fail.Usage, "the cloud image %q belongs to the VM template and cannot be removed", name)
	}
	unlock, err := s.alone()
	if err != nil {
		return err
	}
	defer unlock()
	built, err := s.built()
	if err != nil {
		return err
	}
	for _, i := range built {
		if i.Name == name && inUse != nil && inUse(i.Path) {
			return fail.New(fail.Conflict, "the disks of VMs build on image %s (%s)", name, filepath.Base(i.Path)).WithHint("agent-sessionizer list")
		}
	}
	for _, i := range built {
		if i.Name == name {
			if err := s.discard(name, i.Path); err != nil {
				return err
			}
		}
	}
	return nil
}

// built lists complete images, newest first within name and architecture; the
// first of each is Ready.
func (s *Store) built() ([]Info, error) {
	entries, err := readDir(s.Dir)
	if err != nil {
		return nil, err
	}
	var infos []Info
	for _, e := range entries {
		if !e.IsDir() || !published.MatchString(e.Name()) {
			continue
		}
		if i, err := readInfo(filepath.Join(s.Dir, e.Name())); err == nil {
			infos = append(infos, i)
		}
	}
	slices.SortFunc(infos, func(a, b Info) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Arch, b.Arch), b.CreatedAt.Compare(a.CreatedAt))
	})
	for n := range infos {
		infos[n].Ready = n == 0 || infos[n-1].Name != infos[n].Name || infos[n-1].Arch != infos[n].Arch
	}
	return infos, nil
}

// readInfo reads a published directory; an error means that parts are missing.
func readInfo(dir string) (Info, error) {
	b, err := os.ReadFile(filepath.Join(dir, metaFile))
	if err != nil {
		return Info{}, err
	}
	var i Info
	if err := json.Unmarshal(b, &i); err != nil {
		return Info{}, fmt.Errorf("%s: %w", metaFile, err)
	}
	if !slices.Contains(i.Files, diskFile) {
		return Info{}, errors.New("image lacks a disk")
	}
	for _, f := range i.Files {
		if st, err := os.Stat(filepath.Join(dir, f)); err != nil || st.Size() == 0 {
			return Info{}, fmt.Errorf("image lacks %s", f)
		}
	}
	i.Path, i.Size = dir, DiskUsage(dir)
	states, err := filepath.Glob(filepath.Join(dir, warmPrefix+"*"))
	if err != nil {
		return Info{}, err
	}
	i.Warm = nil
	for _, state := range states {
		if w, err := readWarm(state); err == nil {
			i.Warm = append(i.Warm, w)
		}
	}
	return i, nil
}

// discard takes an image of a name, or a part of it, out of sight in one step, then deletes it. It is named
// like a dead build's work, which the next build or Prune finishes deleting.
func (s *Store) discard(name, dir string) error {
	gone := filepath.Join(s.Dir, fmt.Sprintf("%s%s-gone-%d", workPrefix, name, time.Now().UnixNano()))
	if err := os.Rename(dir, gone); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("remove image: %w", err)
	}
	return removeTree(gone)
}

func readDir(dir string) ([]fs.DirEntry, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return entries, nil
}

func removeTree(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove %s: %w", filepath.Base(dir), err)
	}
	return nil
}
