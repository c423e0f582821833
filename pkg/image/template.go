package image

import (
	"fmt"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// templateImages is the part of a VM template that this package reads.
type templateImages struct {
	Images []struct {
		Location string `yaml:"location"`
		Arch     string `yaml:"arch"`
		Digest   string `yaml:"digest"`
	} `yaml:"images"`
}

// cloudImages returns the template's pinned images. An image without a digest is an
// error, because its content could change at any time.
func cloudImages(template []byte) ([]Info, error) {
	var t templateImages
	if err := yaml.Unmarshal(template, &t); err != nil {
		return nil, fail.New(fail.Usage, "VM template: %w", err)
	}
	var infos []Info
	for _, i := range t.Images {
		remote := strings.Contains(i.Location, "://")
		if remote && (!strings.HasPrefix(i.Location, "https://") || !strings.HasPrefix(i.Digest, "sha256:")) {
			return nil, fail.New(fail.Usage, "VM template: image %s must have an https URL and a sha256 digest", i.Location)
		}
		infos = append(infos, Info{Name: Ubuntu, Arch: i.Arch, Source: i.Location, Key: i.Digest, Ready: true})
	}
	return infos, nil
}

func cloudImage(template []byte, arch string) (vm.Image, error) {
	infos, err := cloudImages(template)
	if err != nil {
		return vm.Image{}, err
	}
	for _, i := range infos {
		if i.Arch == arch {
			return vm.Image{Arch: arch, Location: i.Source, Digest: i.Key}, nil
		}
	}
	return vm.Image{}, fmt.Errorf("image %s: %w", Ubuntu, fail.New(fail.NotFound, "the VM template has no image for %s", arch))
}
