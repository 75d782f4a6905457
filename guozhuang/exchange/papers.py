"""Citations of papers on which several strategies are based, for reports. Each method also names its sources in its file."""

DRYDEN_2019 = (
    "Dryden et al., Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism, IPDPS 2019, "
    "arXiv:1903.06681"
)
GAN_2021 = "Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, VLDB 2021, arXiv:2107.01499"
HUANG_2019 = "Huang et al., GPipe, NeurIPS 2019, arXiv:1811.06965; Narayanan et al., PipeDream, SOSP 2019"
JACOBS_2023 = (
    "Jacobs et al., DeepSpeed Ulysses, 2023, arXiv:2309.14509; Liu et al., Ring Attention, 2023, arXiv:2310.01889"
)
JIANG_2020 = "Jiang et al., BytePS, OSDI 2020"
KIM_2019 = "Kim et al., Parallax, EuroSys 2019, arXiv:1808.02621"
LI_2020 = (
    "Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, arXiv:2006.15704"
)
LIAN_2017 = (
    "Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, arXiv:1705.09056"
)
NARAYANAN_2021 = (
    "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021, "
    "arXiv:2104.04473"
)
PENG_2019 = "Peng et al., ByteScheduler, SOSP 2019"
RAJBHANDARI_2020 = (
    "Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, "
    "arXiv:1910.02054"
)
SHOEYBI_2019 = "Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053"
STICH_2018 = "Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599"
TANG_2021 = "Tang et al., 1-bit Adam, ICML 2021, arXiv:2102.02888"
