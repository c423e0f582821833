package lima

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/lima-vm/lima/pkg/store/filenames"
)

// ImageUsers returns the VMs below home whose disks build on files in dir, or will do
// so after their first start. It needs no Driver.
func ImageUsers(home, dir string) ([]string, error) {
	instances, err := os.ReadDir(home)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the VMs that use an image: %w", err)
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, fmt.Errorf("find the VMs that use an image: %w", err)
	}
	var users []string
	for _, e := range instances {
		vm := filepath.Join(home, e.Name())
		for _, f := range []string{filenames.BaseDisk, filenames.Kernel, filenames.Initrd, filenames.LimaYAML} {
			if refers(filepath.Join(vm, f), dir, real) {
				// A directory that is being created or removed is ".NAME~…", see
				// asidePrefix.
				name, _, _ := strings.Cut(strings.TrimPrefix(e.Name(), "."), "~")
				users = append(users, name)
				break
			}
		}
	}
	return users, nil
}

// refers reports whether file is a link into one of dirs, or a VM configuration that
// names something there.
func refers(file string, dirs ...string) bool {
	text, err := os.Readlink(file)
	if err != nil {
		if filepath.Base(file) != filenames.LimaYAML {
			return false // missing, or a copy of its own
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
