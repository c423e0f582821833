// Package image owns the disk images that sessions start from. It finds the pinned
// Ubuntu cloud image in the VM template, builds images from Debian packages, stores
// golden images and saved states that other packages make, and lists and removes all of
// them.
//
// It never starts a VM and never downloads a cloud image; the driver does both. It
// reads a user's own cloud image only to compute its digest. A published image is
// complete and never changes: a newer build is published beside it. Only saved states
// are added to a published image, and removed.
package image

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// The names of images.
const (
	Ubuntu = "ubuntu" // the cloud image that the VM template pins
	Debian = "debian" // built here by Build
)

// goldenSuffix ends the names of golden images.
const goldenSuffix = ".golden"

// Golden returns the name of the golden image of source. A golden image was booted and
// provisioned once, so that its clones need not be.
func Golden(source string) string { return SourceName(source) + goldenSuffix }

// GoldenOf returns the name of the image that the golden image called name was made
// from.
func GoldenOf(name string) (source string, ok bool) { return strings.CutSuffix(name, goldenSuffix) }

// Info describes one image.
type Info struct {
	Name      string    `json:"name"`
	Arch      string    `json:"arch"`
	Source    string    `json:"source"` // "debian/trixie", the URL of a cloud image, or the source of a golden image
	Key       string    `json:"key"`    // hash of all inputs; for a cloud image, its digest
	Size      int64     `json:"size"`   // bytes on disk, including saved states; 0 for a cloud image
	CreatedAt time.Time `json:"created_at,omitzero"`
	// PreferredAt makes an image count as newer than it is: Make returned it when its
	// inputs were requested again, or it was made while the clock was behind.
	PreferredAt time.Time `json:"preferred_at,omitzero"`
	Path        string    `json:"path,omitempty"` // directory; "" for a cloud image
	Ready       bool      `json:"ready"`          // Lookup returns this image
	Files       []string  `json:"files,omitempty"`
	Warm        []Warm    `json:"warm,omitempty"`
}

// Warm is the saved state of a VM that was booted from an image. Sessions with the same
// CPUs and memory resume from it.
type Warm struct {
	Key       string    `json:"key"` // from vm.Saver.StateKey
	CPUs      int       `json:"cpus"`
	Memory    int64     `json:"memory"` // bytes
	Size      int64     `json:"size"`   // bytes on disk
	CreatedAt time.Time `json:"created_at"`
	Path      string    `json:"path"` // directory
}

// Image returns the image in the form that a driver's Spec needs.
func (i Info) Image() (vm.Image, error) {
	img := vm.Image{Arch: i.Arch, Location: filepath.Join(i.Path, diskFile)}
	if slices.Contains(i.Files, KernelFile) { // otherwise it has its own boot loader
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

// age returns the time by which images of one name are ordered.
func (i Info) age() time.Time {
	if i.PreferredAt.After(i.CreatedAt) {
		return i.PreferredAt
	}
	return i.CreatedAt
}

// Resumed returns i's image in the state in which the VM saved in w left it.
func (i Info) Resumed(w Warm) (vm.Image, error) {
	img, err := i.Image()
	img.Location, img.State = filepath.Join(w.Path, vm.DiskFile), filepath.Join(w.Path, vm.StateFile)
	return img, err
}

// Store is a directory of images. Several processes may call its methods at the same
// time.
type Store struct {
	Dir      string // created when needed
	Template []byte // the VM template, whose images are the source "ubuntu"; may be nil

	make builder // nil means makeDebian
}

// Files in an image's directory, besides vm.DiskFile.
const (
	diskFile    = vm.DiskFile
	KernelFile  = "kernel"
	InitrdFile  = "initrd"
	CmdlineFile = "cmdline"
	metaFile    = "meta.json" // written last: its presence means that the image is complete
)

// published matches NAME-ARCH-KEY-TIME, the name of a published directory. Every entry
// that begins with a dot is a lock, or work that is in progress or was interrupted.
var published = lazyregexp.New(`^[a-z0-9.]+-(x86_64|aarch64)-[0-9a-f]{12}-[0-9]+$`)

// List returns the cloud images of the template and every built image, newest first
// within a name. It leaves out damaged directories, which Prune removes.
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

// Find returns the description of the newest image of a source and architecture. The
// source is an image in the store, by name, or the user's own cloud image.
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

// FindKey returns the built image of a name, an architecture and a key, which need not be
// the newest of that name: another version of the program may use the same store.
func (s *Store) FindKey(name, arch, key string) (Info, error) {
	built, err := s.built()
	if err != nil {
		return Info{}, err
	}
	for _, i := range built {
		if i.Name == name && i.Arch == arch && i.Key == key {
			return i, nil
		}
	}
	return Info{}, notFound(name, arch)
}

func notFound(name, arch string) error {
	e := fail.New(fail.NotFound, "no image %q for %s", name, arch)
	if name == Debian {
		hint := "agent-sessionizer image build --from debian"
		if arch != vm.HostArch() {
			hint += " --arch " + arch
		}
		return e.WithHint("%s", hint)
	}
	return e.WithHint("agent-sessionizer image list")
}

// Lookup returns the image that Find finds, in the form that a driver's Spec needs.
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

// Remove deletes every built image of a name. It succeeds if there are none. If inUse
// reports that VMs' disks refer to the directory of one of them, Remove deletes none.
// inUse may be nil.
func (s *Store) Remove(name string, inUse func(dir string) bool) error {
	if name == Ubuntu {
		return fail.New(fail.Usage, "the cloud image %q belongs to the VM template and cannot be removed", name)
	}
	unlock, err := s.lockExclusive()
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
			return fail.New(fail.Conflict, "the disks of VMs are based on image %s (%s)", name, filepath.Base(i.Path)).WithHint("agent-sessionizer list")
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

// built returns the complete images, newest first within name and architecture. The
// first of each group is Ready.
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
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Arch, b.Arch), b.age().Compare(a.age()))
	})
	for n := range infos {
		infos[n].Ready = n == 0 || infos[n-1].Name != infos[n].Name || infos[n-1].Arch != infos[n].Arch
	}
	return infos, nil
}

// readInfo reads a published directory. An error means that parts are missing.
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
		return Info{}, errors.New("image has no disk")
	}
	for _, f := range i.Files {
		if st, err := os.Stat(filepath.Join(dir, f)); err != nil || st.Size() == 0 {
			return Info{}, fmt.Errorf("image has no %s", f)
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

// discard hides an image of a name, or a part of it, in one step, and then deletes it.
// Meanwhile its name is like that of a dead build's work, so that the next build or
// Prune completes an interrupted deletion.
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
