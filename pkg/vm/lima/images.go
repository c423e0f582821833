package lima

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/lima-vm/lima/pkg/store/filenames"
)

// ImageUsers are the VMs below home whose disks build on files in dir, or will
// when they are started for the first time. It needs no Driver.
func ImageUsers(home, dir string) ([]string, error) {
	instances, err := os.ReadDir(home)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for users of an image: %w", err)
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, fmt.Errorf("look for users of an image: %w", err)
	}
	var users []string
	for _, e := range instances {
		vm := filepath.Join(home, e.Name())
		for _, f := range []string{filenames.BaseDisk, filenames.Kernel, filenames.Initrd, filenames.LimaYAML} {
			if refers(filepath.Join(vm, f), dir, real) {
				// A directory on its way in or out is ".NAME~…", see asidePrefix.
				name, _, _ := strings.Cut(strings.TrimPrefix(e.Name(), "."), "~")
				users = append(users, name)
				break
			}
		}
	}
	return users, nil
}

// refers reports whether file links to, or as the VM's configuration names,
// something in one of dirs.
func refers(file string, dirs ...string) bool {
	text, err := os.Readlink(file)
	if err != nil {
		if filepath.Base(file) != filenames.LimaYAML {
			return false // not there, or a copy of its own
		}
		text = read(file)
	}
	for _, dir := range dirs {
		if strings.Contains(text, dir+string(filepath.Separator)) {
			return true
		}
	}
	return false
}
